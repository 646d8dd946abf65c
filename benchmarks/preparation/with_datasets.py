"""The pipeline written with `datasets.map`, run in an environment that has only `datasets`.

Usage: python -m benchmarks.preparation.with_datasets SOURCE TOKENIZER_FOLDER TARGET PROCESSES typical|tuned

typical: one record at a time through the tokenizer's chat template, once up to each answer and once including it to find
the trained tokens, as TRL's SFTTrainer maps a dataset of prompts and completions.
tuned: the template's text around a question is precomputed, and texts are passed in batches to the bare tokenizer.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.preparation.steps import Row, digest, is_english, mask_row, messages_of


def typical(folder: str) -> Callable[[Row], Row]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(messages: list[dict[str, str]], *, answer: bool = False) -> list[int]:
        found: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=answer, return_dict=False)
        return found

    def tokenize(row: Row) -> Row:
        messages = messages_of(row)
        whole = ids(messages)
        learned = [False] * len(whole)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start = len(ids(messages[:number], answer=True))
                end = len(whole) if number + 1 == len(messages) else len(ids(messages[: number + 1]))
                learned[start:end] = [True] * (end - start)
        return {"input_ids": whole, "assistant_mask": learned}

    return tokenize


def tuned(folder: str) -> Callable[[dict[str, list[str]]], dict[str, list[Any]]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    before, after = json.loads(Path(folder, "around.json").read_text())

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[Any]]:
        prompts = [f"{before}{text}{after}" for text in rows["instruction"]]
        asked = tokenizer.encode_batch_fast(prompts, add_special_tokens=False)
        answers = tokenizer.encode_batch_fast(rows["answer"], add_special_tokens=False)
        pairs = list(zip(asked, answers, strict=True))
        return {
            "input_ids": [first.ids + second.ids for first, second in pairs],
            "assistant_mask": [[False] * len(first.ids) + [True] * len(second.ids) for first, second in pairs],
        }

    return tokenize


def main() -> None:
    from datasets import load_dataset

    source, folder, target, processes, way = sys.argv[1:]
    seen: set[bytes] = set()

    def is_new(row: Row) -> bool:
        known = digest(row)
        new = known not in seen
        seen.add(known)
        return new

    workers = int(processes) if int(processes) > 1 else None
    data = load_dataset("json", data_files=source, split="train", cache_dir=f"{target}-cache")
    data = data.map(mask_row, num_proc=workers).filter(is_new).filter(is_english, num_proc=workers)
    if way == "typical":
        data = data.map(typical(folder), num_proc=workers)
    else:
        data = data.map(tuned(folder), batched=True, num_proc=workers)
    data.shuffle(seed=42).flatten_indices(num_proc=workers).save_to_disk(target)
    print(len(data), "records kept")


if __name__ == "__main__":
    main()
