"""Records of a version, a block at a time, so that memory stays flat."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from recipes.records.layouts import Layout, Unfit, layout_of, said

RECORDS = 8192
BYTES = 8 << 20


@dataclass(frozen=True)
class Block:
    """Consecutive records: their lines as bytes, as values, and as the text that a model reads of them.

    `start` is the line of the first; lines count from 1 over all files. A record without a layout has None.
    """

    start: int
    lines: Sequence[bytes]
    rows: Sequence[dict[str, Any]]
    layouts: Sequence[Layout | None]
    texts: Sequence[str]


def blocks(records: Iterable[bytes]) -> Iterator[Block]:
    """All blocks of records, each a line with one JSON object."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    start, lines, size = 1, [], 0
    for line in records:
        if not line.strip():
            continue
        lines.append(line)
        size += len(line)
        if len(lines) == RECORDS or size >= BYTES:
            yield block(start, lines, [decode(line) for line in lines])
            start, lines, size = start + len(lines), [], 0
    if lines:
        yield block(start, lines, [decode(line) for line in lines])


def lines_in(files: Iterable[Path]) -> Iterator[bytes]:
    """The lines of files, one file after the other."""
    for file in files:
        with file.open("rb") as stream:
            yield from stream


def block(start: int, lines: Sequence[bytes], rows: Sequence[dict[str, Any]]) -> Block:
    read = [read_by_a_model(row) for row in rows]
    return Block(start, lines, rows, [layout for layout, _ in read], [text for _, text in read])


def read_by_a_model(row: dict[str, Any]) -> tuple[Layout | None, str]:
    """The layout of a record and its text; where it has no layout, all texts in it."""
    try:
        layout = layout_of(row)
    except Unfit:
        return None, "\n".join(texts_in(row))
    return layout, said(row, layout)


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)
