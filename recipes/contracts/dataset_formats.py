"""File formats of raw datasets, and how their files are named."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

FormatName = Literal["jsonl", "parquet", "csv", "arrow", "text"]
"""For models of requests and definitions, whose schemas list the values in place."""


class Format(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"
    CSV = "csv"
    ARROW = "arrow"
    TEXT = "text"


ENDINGS: Mapping[str, tuple[str, ...]] = {
    Format.JSONL: (".jsonl",),
    Format.PARQUET: (".parquet",),
    Format.CSV: (".csv",),
    Format.ARROW: (".arrow", ".feather", ".ipc", ".arrows"),
    Format.TEXT: (".txt", ".text"),
}
COMPRESSIONS = (".gz", ".zst")
LINE_FORMATS = (Format.JSONL, Format.CSV, Format.TEXT)
"""Formats whose files may be compressed as a whole; the others compress within."""


def has_format(name: str, format: Format) -> bool:
    """Whether a file's name ends as those of a format do."""
    endings = ENDINGS[format]
    packed = tuple(ending + compression for ending in endings for compression in COMPRESSIONS if format in LINE_FORMATS)
    return name.lower().endswith(endings + packed)
