"""Records as JSON lines, and how an answer to one is judged."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.contracts.job import BadConfiguration
from recipes.records.layouts import KEYS, Layout, Unfit, layout_of, question


@dataclass(frozen=True)
class Record:
    """One example, of any layout."""

    row: Mapping[str, Any]
    layout: Layout

    @property
    def instruction(self) -> str:
        """What is asked."""
        return question(self.row, self.layout)

    @property
    def answer(self) -> str:
        """What should be answered: of a conversation, the last that the assistant says; of a pair, the chosen one."""
        if self.layout is Layout.MESSAGES:
            said = [message.get("content") or "" for message in self.row["messages"] if message["role"] == "assistant"]
            return str(said[-1])
        return str(self.row[KEYS[self.layout][min(1, len(KEYS[self.layout]) - 1)]])

    @property
    def key(self) -> str:
        """The word by which an answer is judged, of any JSON value, such as a number; without one it is the answer."""
        key = self.row.get("key")
        return self.answer if key is None else str(key)


def record_of(row: Mapping[str, Any]) -> Record:
    """Raises recipes.records.layouts.Unfit: the row has no layout that a model could be trained on."""
    return Record(row, layout_of(row))


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """One row a line. Only a newline ends one: JSON texts may hold the other separators that `splitlines` knows."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def read_records(folder: Path) -> list[Record]:
    """All records of a split.

    Raises:
        BadConfiguration: one has no layout that a model could be trained on; the message names its file and line.
    """
    return list(each_record(folder))


def each_record(folder: Path) -> Iterator[Record]:
    """As `read_records`, without holding them."""
    for file in sorted(folder.glob("*.jsonl")):
        for line, row in enumerate(json_lines(file), start=1):
            try:
                yield record_of(row)
            except Unfit as problem:
                raise BadConfiguration(f"{file.name}, line {line}: the record {problem}") from None


def normalize(text: str) -> str:
    """Lower case, words only: the form in which texts are compared."""
    return " ".join(re.findall(r"\w+", text.lower()))


def is_correct(record: Record, answer: str) -> bool:
    """An answer counts when the record's key stands in it as whole words."""
    return f" {normalize(record.key)} " in f" {normalize(answer)} "
