"""The formats of raw files (rows B2, B15) and how each becomes records."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from recipes.contracts.dataset_formats import Format
from recipes.records.fingerprint import canonical_line
from resources.errors import invalid
from resources.ingest.columnar import arrow_records, parquet_records
from resources.ingest.csv_records import Kind, csv_records
from resources.ingest.decompression_bomb import NAMES, WORDS, is_swollen
from resources.ingest.json_lines import json_records
from resources.ingest.problems import Problem
from resources.ingest.raw_file import Damaged, Recorded, bytes_of, unpacked
from resources.ingest.text import text_records


def format_of(name: str) -> Format:
    """Raises 400 for a format that nobody knows."""
    try:
        return Format(name)
    except ValueError:
        raise invalid(f"format '{name}' is not supported: use {', '.join(Format)}") from None


Item = tuple[dict[str, Any], bytes] | Problem
"""A record with its canonical line, or in its place what is wrong with it."""


def records_of(file: Recorded, format: Format, kinds: Mapping[str, Kind]) -> Iterator[Item]:
    """The records of a file, each with its canonical line, and in their place what is wrong with it. Nothing is read twice
    but what needs seeking.

    Args:
        kinds: the types of the columns of CSV.

    Raises:
        Damaged: it is compressed, and breaks off; or far larger unpacked, or as records, than it is.
    """
    match format:
        case Format.JSONL:
            yield from json_records(unpacked(file))
        case Format.TEXT:
            yield from in_lines(text_records(unpacked(file)))
        case Format.CSV:
            opened = unpacked(file)
            # As many names as cells: what a wide table has in common with a file that swells.
            yield from no_larger(in_lines(csv_records(opened, kinds)), lambda: bytes_of(opened), NAMES)
        case Format.PARQUET:
            yield from no_larger(in_lines(parquet_records(file.again())), lambda: file.size, WORDS)
        case Format.ARROW:
            yield from no_larger(in_lines(arrow_records(file.again())), lambda: file.size, WORDS)


def in_lines(rows: Iterator[dict[str, Any] | Problem]) -> Iterator[Item]:
    for row in rows:
        yield row if isinstance(row, Problem) else (row, canonical_line(row))


def no_larger(items: Iterator[Item], size: Callable[[], int], words: str) -> Iterator[Item]:
    """The items, until the lines of the records are swollen against `size`, the bytes that they were read from until then.

    Raises:
        Damaged: they are; with `words`.
    """
    length = 0
    for item in items:
        if not isinstance(item, Problem):
            length += len(item[1])
            if is_swollen(length, size()):
                raise Damaged(words)
        yield item
