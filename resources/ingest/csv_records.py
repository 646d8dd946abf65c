"""Read CSV (RFC 4180).

The first line names the columns; a column has one type for all its values, in all files. Files are read twice, because the
last value may be the one that is not a number. A column is a boolean, an integer or a number only if nothing is lost: `007`
and numbers with more digits than a double holds stay texts. So do columns that a model reads as text. An empty cell is null
in a typed column, and an empty text in a text column.
"""

import csv
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, BinaryIO, TextIO

from recipes.contracts.quantities import pluralize
from recipes.records.record_layouts import read_text_columns
from resources.ingest.column_schema import MAX_COLUMNS
from resources.ingest.json_lines import MAX_LINE_BYTES
from resources.ingest.problems import CHANGED_WHILE_READ, EMPTY, Problem

INTEGER = re.compile(r"-?(0|[1-9]\d{0,17})", re.ASCII)
NUMBER = re.compile(r"-?(?P<digits>(0|[1-9]\d*)(\.\d+)?)([eE][-+]?\d{1,2})?", re.ASCII)
OTHER_SEPARATORS = ("\t", ";", "|")
"""Separators that some programs write instead of commas."""
EXACT_DIGITS = 15
"""Number of decimal digits that every double preserves."""


class Kind(Enum):
    UNKNOWN = "unknown"
    BOOLEAN = "boolean"
    INTEGER = "integer"
    LONG = "integer that no double holds"
    NUMBER = "number"
    TEXT = "text"


JOINED_KINDS = {
    frozenset({Kind.INTEGER, Kind.LONG}): Kind.LONG,
    frozenset({Kind.INTEGER, Kind.NUMBER}): Kind.NUMBER,
}
CONVERTERS: dict[Kind, Callable[[str], Any]] = {
    Kind.BOOLEAN: lambda cell: cell == "true" if cell else None,
    Kind.INTEGER: lambda cell: int(cell) if cell else None,
    Kind.LONG: lambda cell: int(cell) if cell else None,
    Kind.NUMBER: lambda cell: float(cell) if cell else None,
    Kind.UNKNOWN: str,
    Kind.TEXT: str,
}


def cell_kind(cell: str) -> Kind:
    if not cell:
        return Kind.UNKNOWN
    if cell in ("true", "false"):
        return Kind.BOOLEAN
    if INTEGER.fullmatch(cell):
        return Kind.INTEGER if len(cell.lstrip("-")) <= EXACT_DIGITS else Kind.LONG
    number = NUMBER.fullmatch(cell)
    return Kind.NUMBER if number and sum(map(str.isdigit, number["digits"])) <= EXACT_DIGITS else Kind.TEXT


def join_kinds(first: Kind, second: Kind) -> Kind:
    if first is second or second is Kind.UNKNOWN:
        return first
    if first is Kind.UNKNOWN:
        return second
    return JOINED_KINDS.get(frozenset({first, second}), Kind.TEXT)


def read_csv_kinds(stream: BinaryIO, report: Callable[[Problem], None]) -> dict[str, Kind]:
    """Return the type of each column in a file, and report the file's problems."""
    header: list[str] | None = None
    kinds: list[Kind] = []
    count = problems = 0
    for item in read_rows(stream):
        if isinstance(item, Problem):
            report(item)
            problems += 1
        elif header is None:
            header, kinds = item, [Kind.UNKNOWN] * len(item)
            for problem in find_header_problems(item):
                report(problem)
                problems += 1
        else:
            count += 1
            for index, cell in enumerate(item):
                if kinds[index] is not Kind.TEXT:
                    kinds[index] = join_kinds(kinds[index], cell_kind(cell))
    if not problems and not count:
        report(EMPTY)
    texts = read_text_columns(header or ())
    return {name: Kind.TEXT if name in texts else kind for name, kind in zip(header or (), kinds, strict=True)}


def read_csv(stream: BinaryIO, kinds: Mapping[str, Kind]) -> Iterator[dict[str, Any] | Problem]:
    """Yield the records of a file that had no problems.

    `kinds` are types that fit all values.
    """
    rows = read_rows(stream)
    header = next(rows, CHANGED_WHILE_READ)
    if isinstance(header, Problem) or not set(header) <= kinds.keys():
        yield CHANGED_WHILE_READ
        return
    convert = [CONVERTERS[kinds[name]] for name in header]
    for row in rows:
        try:
            # The file was changed after the first pass: report that, and do not show its contents.
            yield (
                CHANGED_WHILE_READ
                if isinstance(row, Problem)
                else {name: make(cell) for name, make, cell in zip(header, convert, row, strict=True)}
            )
        except ValueError:
            yield CHANGED_WHILE_READ


def find_header_problems(header: Sequence[str]) -> Iterator[Problem]:
    if len(header) > MAX_COLUMNS:
        yield Problem(f"has {len(header)} columns: a dataset has at most {MAX_COLUMNS}", "line 1")
        return
    if len(header) == 1 and (separators := [separator for separator in OTHER_SEPARATORS if separator in header[0]]):
        name = "a tab" if separators[0] == "\t" else f"'{separators[0]}'"
        yield Problem(f"columns seem to be separated by {name}: write the file with commas", "line 1")
    for index, name in enumerate(header):
        if not name:
            yield Problem(f"column {index + 1} has no name", "line 1")
        elif name in header[:index]:
            yield Problem(f"two columns are called '{name}'", "line 1")


class RowTooLong(Exception):
    """A row is longer than the maximum length of a record."""


def read_rows(stream: BinaryIO) -> Iterator[list[str] | Problem]:
    """Yield the header, then rows with the same number of cells, or their problems.

    Empty lines are skipped.
    """
    csv.field_size_limit(sys.maxsize)  # of the whole module: its default of 128 KiB is too small for texts
    lines = BoundedLines(io.TextIOWrapper(stream, "utf-8-sig", newline=""))
    reader = csv.reader(lines, strict=True)
    width = 0
    while True:
        start = reader.line_num + 1
        lines.begin_row()
        try:
            row = next(reader)
        except StopIteration:
            return
        except RowTooLong:
            yield Problem(f"longer than {MAX_LINE_BYTES >> 20} MiB: is there a quote that does not end?", f"line {start}")
            return
        except csv.Error as error:
            yield Problem(f"not CSV ({error})", f"line {reader.line_num}")
            continue
        except UnicodeDecodeError:
            yield Problem("not UTF-8", f"line {reader.line_num + 1} or soon after")
            return
        if not row:
            continue
        if width and len(row) != width:
            yield Problem(f"has {pluralize(len(row), 'cell')}, the first line has {width}", f"line {reader.line_num}")
            continue
        width = len(row)
        yield row


class BoundedLines:
    """Limits the length of a row.

    A row with an open quote may span several lines. Without the limit, a row that never ends would use all memory.
    """

    def __init__(self, text: TextIO) -> None:
        self._text = text
        self._remaining = 0

    def begin_row(self) -> None:
        self._remaining = MAX_LINE_BYTES

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._text.readline(self._remaining + 1)
        self._remaining -= len(line)
        if self._remaining < 0:
            raise RowTooLong
        if not line:
            raise StopIteration
        return line
