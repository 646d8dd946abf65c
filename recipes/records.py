"""Records of instruction data as JSON lines, and the texts that they become for a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.runner import say
from recipes.schema import BadConfiguration

if TYPE_CHECKING:  # the library takes a second to load, and much of what stands on this file tokenizes nothing
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label that the loss leaves out (torch.nn.CrossEntropyLoss)."""


@dataclass(frozen=True)
class Record:
    """One example: what is asked, what should be answered, and the word by which an answer is judged."""

    instruction: str
    answer: str
    key: str


@dataclass(frozen=True)
class Example:
    """A tokenized record: `labels` equals `tokens` on the answer and `IGNORED` before it; both have the same length."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """One row a line. Only a newline ends one: JSON texts may hold the other separators that `splitlines` knows."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]


def write_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One row a line, keys in the rows' own order, so that equal rows are equal bytes."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_records(folder: Path) -> list[Record]:
    """All records of a split. A key may be any JSON value, such as a number; without one the answer is the key."""
    rows = (row for file in sorted(folder.glob("*.jsonl")) for row in read_json_lines(file))
    keys = ((row, row.get("key")) for row in rows)
    return [Record(row["instruction"], row["answer"], row["answer"] if key is None else str(key)) for row, key in keys]


def normalize(text: str) -> str:
    """Lower case, words only: the form in which texts are compared."""
    return " ".join(re.findall(r"\w+", text.lower()))


def is_correct(record: Record, answer: str) -> bool:
    """An answer counts when the record's key stands in it as whole words."""
    return f" {normalize(record.key)} " in f" {normalize(answer)} "


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, instruction: str, system_prompt: str | None) -> list[int]:
    """The conversation up to where the assistant starts to answer, in the tokenizer's own chat template."""
    messages = [{"role": "user", "content": instruction}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode(
    tokenizer: PreTrainedTokenizerBase, records: Sequence[Record], system_prompt: str | None, max_length: int
) -> list[Example]:
    """Tokenize records for training; the loss is taken on the answer and its end token alone.

    A record longer than `max_length` tokens is cut at its end; one whose answer is cut off altogether is left out, since
    the loss of a row without any answer is NaN.

    Raises:
        BadConfiguration: no record is left.
    """
    examples = []
    for record in records:
        prompt = prompt_tokens(tokenizer, record.instruction, system_prompt)
        answer = [*list(tokenizer(record.answer, add_special_tokens=False)["input_ids"]), tokenizer.eos_token_id]
        tokens = (prompt + answer)[:max_length]
        labels = ([IGNORED] * len(prompt) + answer)[:max_length]
        if any(label != IGNORED for label in labels[1:]):  # nothing predicts the first token, so it is never learned
            examples.append(Example(tuple(tokens), tuple(labels)))
    if not examples:
        raise BadConfiguration(f"no answer fits into sequence_length {max_length}: raise it in the recipe")
    if left_out := len(records) - len(examples):
        say(f"{left_out} of {len(records)} records left out: their prompts alone fill sequence_length {max_length}")
    return examples
