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
"""Placeholder for a missing column."""

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
    """Convert to the nearest double: JSON integers may exceed the range of doubles."""
    return float(min(max(value, -MAX_DOUBLE), MAX_DOUBLE))


def read_column(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[Any], list[str]]:
    """Return a column's values and their JSON types."""
    values = [row.get(name, MISSING) for row in rows]
    return values, [JSON_TYPES[type(value)] for value in values]


MAX_BLOCK_RECORDS = 8192
MAX_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class RecordBlock:
    """Consecutive records as lines, as values, and as the text that a model reads.

    `start` is the first record's line; lines count from 1 over all files. Records without a layout have None.
    """

    start: int
    lines: Sequence[bytes]
    rows: Sequence[dict[str, Any]]
    layouts: Sequence[Layout | None]
    texts: Sequence[str]


def iterate_blocks(records: Iterable[bytes]) -> Iterator[RecordBlock]:
    """Yield blocks of records from JSON lines."""
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
    """Yield the lines of files in sequence."""
    for file in files:
        with file.open("rb") as stream:
            yield from stream


def make_block(start: int, lines: Sequence[bytes], rows: Sequence[dict[str, Any]]) -> RecordBlock:
    read = [read_layout_and_text(row) for row in rows]
    return RecordBlock(start, lines, rows, [layout for layout, _ in read], [text for _, text in read])


def read_layout_and_text(row: dict[str, Any]) -> tuple[Layout | None, str]:
    """Return the layout and text of a record; without a layout, all its texts."""
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
