"""The formats of raw files and how each becomes records."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from recipes.contracts.dataset_formats import Format
from recipes.records.fingerprint import encode_stored_line
from resources.errors import invalid
from resources.ingest.columnar import read_arrow, read_parquet
from resources.ingest.csv_records import Kind, read_csv
from resources.ingest.decompression_bomb import COLUMN_NAMES_MESSAGE, EXPANSION_MESSAGE, exceeds_expansion_limit
from resources.ingest.json_lines import BYTE_ORDER_MARK, MAX_LINE_BYTES, read_json_lines, split_lines
from resources.ingest.problems import EMPTY, Problem
from resources.ingest.raw_file import DamagedFile, TeeStream, bytes_read, decompress

# Text: each line that is not blank is a record with the single column `text`.


def read_text(stream: BinaryIO) -> Iterator[dict[str, Any] | Problem]:
    is_empty = True
    for number, line in enumerate(split_lines(stream), start=1):
        raw = line.removeprefix(BYTE_ORDER_MARK)
        if not raw or raw.isspace():
            continue
        is_empty = False
        if len(line) == MAX_LINE_BYTES:
            yield Problem(f"longer than {MAX_LINE_BYTES >> 20} MiB", f"line {number}")
            continue
        try:
            yield {"text": raw.removesuffix(b"\r").decode()}
        except UnicodeDecodeError:
            yield Problem("not UTF-8", f"line {number}")
    if is_empty:
        yield EMPTY


def parse_format(name: str) -> Format:
    """Return the format with a name. Raises HanzoError: 400 for an unknown one."""
    try:
        return Format(name)
    except ValueError:
        raise invalid(f"format '{name}' is not supported: use {', '.join(Format)}") from None


Item = tuple[dict[str, Any], bytes] | Problem
"""A record with its stored line, or a problem in its place."""


def read_records(file: TeeStream, format: Format, kinds: Mapping[str, Kind]) -> Iterator[Item]:
    """Yield the records of a file with their stored lines, or problems instead.

    Only formats that need seeking are read twice.

    Args:
        kinds: the types of CSV columns.

    Raises:
        DamagedFile: it is compressed and truncated, or expands too much, either decompressed or as records.
    """
    match format:
        case Format.JSONL:
            yield from read_json_lines(decompress(file))
        case Format.TEXT:
            yield from add_stored_lines(read_text(decompress(file)))
        case Format.CSV:
            opened = decompress(file)
            # A wide table with long column names may expand like a decompression bomb.
            yield from limit_expansion(
                add_stored_lines(read_csv(opened, kinds)), lambda: bytes_read(opened), COLUMN_NAMES_MESSAGE
            )
        case Format.PARQUET:
            yield from limit_expansion(add_stored_lines(read_parquet(file.reopen())), lambda: file.size, EXPANSION_MESSAGE)
        case Format.ARROW:
            yield from limit_expansion(add_stored_lines(read_arrow(file.reopen())), lambda: file.size, EXPANSION_MESSAGE)


def add_stored_lines(rows: Iterator[dict[str, Any] | Problem]) -> Iterator[Item]:
    for row in rows:
        yield row if isinstance(row, Problem) else (row, encode_stored_line(row))


def limit_expansion(items: Iterator[Item], size: Callable[[], int], words: str) -> Iterator[Item]:
    """Yield the items until the records' lines exceed the expansion limit.

    `size` returns the number of bytes read so far.

    Raises:
        DamagedFile: the limit is exceeded; with the message `words`.
    """
    length = 0
    for item in items:
        if not isinstance(item, Problem):
            length += len(item[1])
            if exceeds_expansion_limit(length, size()):
                raise DamagedFile(words)
        yield item
