"""The formats of raw files (rows B2, B15) and how each becomes records."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from recipes.fingerprint import canonical_line
from resources.errors import invalid
from resources.ingest.columnar import arrow_records, parquet_records
from resources.ingest.comma_separated import Kind, csv_records
from resources.ingest.json_lines import json_records
from resources.ingest.problems import Problem
from resources.ingest.raw_file import Recorded, unpacked
from resources.ingest.text import text_records


class Format(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"
    CSV = "csv"
    ARROW = "arrow"
    TEXT = "text"


ENDINGS = {
    Format.JSONL: (".jsonl",),
    Format.PARQUET: (".parquet",),
    Format.CSV: (".csv",),
    Format.ARROW: (".arrow", ".feather", ".ipc", ".arrows"),
    Format.TEXT: (".txt", ".text"),
}
COMPRESSIONS = (".gz", ".zst")
LINES = (Format.JSONL, Format.CSV, Format.TEXT)
"""Formats whose files may be compressed as a whole; the others compress within."""


def format_of(name: str) -> Format:
    """Raises 400 for a format that nobody knows."""
    try:
        return Format(name)
    except ValueError:
        raise invalid(f"format '{name}' is not supported: use {', '.join(Format)}") from None


def has_format(name: str, format: Format) -> bool:
    """Whether a file's name ends as those of a format do."""
    endings = ENDINGS[format]
    packed = tuple(ending + compression for ending in endings for compression in COMPRESSIONS if format in LINES)
    return name.lower().endswith(endings + packed)


def records_of(
    file: Recorded, format: Format, kinds: Mapping[str, Kind]
) -> Iterator[tuple[dict[str, Any], bytes] | Problem]:
    """The records of a file, each with its canonical line, and in their place what is wrong with it. Nothing is read twice
    but what needs seeking.

    Args:
        kinds: the types of the columns of CSV.

    Raises:
        Damaged: it is compressed, and breaks off.
    """
    if format is Format.JSONL:
        yield from json_records(unpacked(file))
        return
    for item in rows_of(file, format, kinds):
        yield item if isinstance(item, Problem) else (item, canonical_line(item))


def rows_of(file: Recorded, format: Format, kinds: Mapping[str, Kind]) -> Iterator[dict[str, Any] | Problem]:
    """The records of a file of a format in which they are not JSON."""
    match format:
        case Format.TEXT:
            yield from text_records(unpacked(file))
        case Format.CSV:
            yield from csv_records(unpacked(file), kinds)
        case Format.PARQUET:
            yield from parquet_records(file.again())
        case Format.ARROW:
            yield from arrow_records(file.again())
