"""The pipeline written with datatrove, run in an environment that has only datatrove.

Usage: python -m benchmarks.preparation.with_datatrove SOURCE TOKENIZER_FOLDER TARGET

datatrove has no chat templates: a text is built from the precomputed text around questions and answers, with the ranges that
are excluded from the loss. Duplicates are found in a separate pass, as datatrove does.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.preparation.steps import Row, is_english, mask_row, messages_of, text_of


def main() -> None:
    from datatrove.data import Document, DocumentsPipeline
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig, ExactDedupFilter, ExactDedupSignature, ExactFindDedups
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    source, folder, target = sys.argv[1:]
    before, after = json.loads(Path(folder, "around.json").read_text())
    end = json.loads(Path(folder, "tokenizer_config.json").read_text())["eos_token"]
    kept = 0

    def adapted(_: Any, data: Row, path: str, number: int | str) -> Row:
        return {"text": text_of(data), "id": f"{path}/{number}", "metadata": {"row": data}}

    def content(document: Document) -> bytes:
        return str(document.text).encode()

    def mask(documents: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        for document in documents:
            document.metadata["row"] = mask_row(document.metadata["row"])
            yield document

    def in_english(document: Document) -> bool:
        return is_english(document.metadata["row"])

    def as_chat(documents: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        nonlocal kept
        for document in documents:
            text, unlearned = "", []
            for message in messages_of(document.metadata["row"]):
                if message["role"] == "user":
                    unlearned.append((len(text), len(text) + len(before) + len(message["content"]) + len(after)))
                    text += f"{before}{message['content']}{after}"
                else:
                    text += f"{message['content']}{end}"
            document.text, document.metadata = text, {"no_loss_ranges": unlearned}
            kept += 1
            yield document

    place = Path(source)
    config = ExactDedupConfig(content_getter=content)

    def read() -> JsonlReader:
        return JsonlReader(str(place.parent), glob_pattern=place.name, adapter=adapted)

    def run(name: str, *steps: Any) -> None:
        LocalPipelineExecutor([*steps], tasks=1, workers=1, logging_dir=f"{target}/logs/{name}").run()

    run("signatures", read(), ExactDedupSignature(f"{target}/signatures", config))
    run("duplicates", ExactFindDedups(f"{target}/signatures", f"{target}/duplicates", config))
    tokenizer = DocumentTokenizer(
        f"{target}/tokens", f"{folder}/tokenizer.json", save_loss_metadata=True, seed=42, batch_size=1000
    )
    distinct = ExactDedupFilter(f"{target}/duplicates", config)
    run("tokens", read(), distinct, mask, LambdaFilter(in_english), as_chat, tokenizer)
    print(kept, "records kept")


if __name__ == "__main__":
    main()
