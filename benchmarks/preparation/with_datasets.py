"""The same pipeline as its users write it with `datasets.map`. Runs in an environment that has `datasets`, without ours.

Usage: python -m benchmarks.preparation.with_datasets SOURCE TOKENIZER_FOLDER TARGET PROCESSES
Patterns, language model and tokenizer are the ones that our program uses; only how they are driven differs.
"""

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def main() -> None:
    from datasets import load_dataset
    from tokenizers import Tokenizer

    from benchmarks.preparation.english import english
    from recipes.preparation.personal_data import mask_text

    source, folder, target, processes = sys.argv[1:]
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    before, after = json.loads(Path(folder, "around.json").read_text())
    seen: set[bytes] = set()

    def is_new(row: dict[str, str]) -> bool:
        digest = hashlib.blake2b(f"{row['instruction']}\0{row['answer']}".encode(), digest_size=16).digest()
        new = digest not in seen
        seen.add(digest)
        return new

    def mask(row: dict[str, str]) -> dict[str, str]:
        return {name: mask_text(row[name], Counter()) for name in ("instruction", "answer")}

    def is_english(row: dict[str, str]) -> bool:
        return english().problem(f"{row['instruction']}\n{row['answer']}") is None

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[Any]]:
        prompts = [f"{before}{text}{after}" for text in rows["instruction"]]
        asked = tokenizer.encode_batch_fast(prompts, add_special_tokens=False)
        answers = tokenizer.encode_batch_fast(rows["answer"], add_special_tokens=False)
        pairs = list(zip(asked, answers, strict=True))
        return {
            "input_ids": [first.ids + second.ids for first, second in pairs],
            "assistant_mask": [[False] * len(first.ids) + [True] * len(second.ids) for first, second in pairs],
        }

    workers = int(processes) if int(processes) > 1 else None
    data = load_dataset("json", data_files=source, split="train", cache_dir=f"{target}-cache")
    data = data.map(mask, num_proc=workers).filter(is_new).filter(is_english, num_proc=workers)
    data = data.map(tokenize, batched=True, num_proc=workers)
    data.shuffle(seed=42).flatten_indices(num_proc=workers).save_to_disk(target)
    print(len(data))


if __name__ == "__main__":
    main()
