"""Read records in blocks of bounded memory, with the JSON types of their columns."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from recipes.records.conversation import UnfitRecord
from recipes.records.record_layouts import Layout, detect_layout, read_record_text

MISSING = object()
"""Stands where a record does not have the column."""

JSON_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
    object: "missing",
}

MAX_DOUBLE = sys.float_info.max


def to_double(value: float) -> float:
    """The nearest double: JSON has integers beyond all of them."""
    return float(min(max(value, -MAX_DOUBLE), MAX_DOUBLE))


def read_column(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[Any], list[str]]:
    """The values of a column and their kinds."""
    values = [row.get(name, MISSING) for row in rows]
    return values, [JSON_TYPES[type(value)] for value in values]


MAX_BLOCK_RECORDS = 8192
MAX_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class RecordBlock:
    """Consecutive records: their lines as bytes, as values, and as the text that a model reads of them.

    `start` is the line of the first; lines count from 1 over all files. A record without a layout has None.
    """

    start: int
    lines: Sequence[bytes]
    rows: Sequence[dict[str, Any]]
    layouts: Sequence[Layout | None]
    texts: Sequence[str]


def iterate_blocks(records: Iterable[bytes]) -> Iterator[RecordBlock]:
    """All blocks of records, each a line with one JSON object."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    start, lines, size = 1, [], 0
    for line in records:
        if not line.strip():
            continue
        lines.append(line)
        size += len(line)
        if len(lines) == MAX_BLOCK_RECORDS or size >= MAX_BLOCK_BYTES:
            yield make_block(start, lines, [decode(line) for line in lines])
            start, lines, size = start + len(lines), [], 0
    if lines:
        yield make_block(start, lines, [decode(line) for line in lines])


def iterate_lines(files: Iterable[Path]) -> Iterator[bytes]:
    """The lines of files, one file after the other."""
    for file in files:
        with file.open("rb") as stream:
            yield from stream


def make_block(start: int, lines: Sequence[bytes], rows: Sequence[dict[str, Any]]) -> RecordBlock:
    read = [read_layout_and_text(row) for row in rows]
    return RecordBlock(start, lines, rows, [layout for layout, _ in read], [text for _, text in read])


def read_layout_and_text(row: dict[str, Any]) -> tuple[Layout | None, str]:
    """The layout of a record and its text; where it has no layout, all texts in it."""
    try:
        layout = detect_layout(row)
    except UnfitRecord:
        return None, "\n".join(iterate_texts(row))
    return layout, read_record_text(row, layout)


def iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from iterate_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from iterate_texts(item)
