"""CSV (RFC 4180): the first line names the columns, and a column has the type that all its values have.

A file is read twice, since the last value may be the one that is no number. A column is a boolean, an integer or a number
only if nothing is lost by it: `007` and numbers of more digits than a double holds stay texts. An empty cell is null in a
column that has a type, and an empty text in one of texts.
"""

import csv
import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, BinaryIO

from resources.ingest.problems import Problem

INTEGER = re.compile(r"-?(0|[1-9]\d{0,17})", re.ASCII)
NUMBER = re.compile(r"-?(?P<digits>(0|[1-9]\d*)(\.\d+)?)([eE][-+]?\d{1,2})?", re.ASCII)
OTHERS = ("\t", ";", "|")
"""What some programs write between columns."""
EXACT_DIGITS = 15
"""Decimal digits that every double keeps."""


class Kind(Enum):
    UNKNOWN = "unknown"
    BOOLEAN = "boolean"
    INTEGER = "integer"
    LONG = "integer that no double holds"
    NUMBER = "number"
    TEXT = "text"


JOINED = {
    frozenset({Kind.INTEGER, Kind.LONG}): Kind.LONG,
    frozenset({Kind.INTEGER, Kind.NUMBER}): Kind.NUMBER,
}
CONVERT: dict[Kind, Callable[[str], Any]] = {
    Kind.BOOLEAN: lambda cell: cell == "true" if cell else None,
    Kind.INTEGER: lambda cell: int(cell) if cell else None,
    Kind.LONG: lambda cell: int(cell) if cell else None,
    Kind.NUMBER: lambda cell: float(cell) if cell else None,
    Kind.UNKNOWN: str,
    Kind.TEXT: str,
}


def kind_of(cell: str) -> Kind:
    if not cell:
        return Kind.UNKNOWN
    if cell in ("true", "false"):
        return Kind.BOOLEAN
    if INTEGER.fullmatch(cell):
        return Kind.INTEGER if len(cell.lstrip("-")) <= EXACT_DIGITS else Kind.LONG
    number = NUMBER.fullmatch(cell)
    return Kind.NUMBER if number and sum(map(str.isdigit, number["digits"])) <= EXACT_DIGITS else Kind.TEXT


def joined(first: Kind, second: Kind) -> Kind:
    if first is second or second is Kind.UNKNOWN:
        return first
    if first is Kind.UNKNOWN:
        return second
    return JOINED.get(frozenset({first, second}), Kind.TEXT)


def csv_kinds(stream: BinaryIO) -> list[Kind] | list[Problem]:
    """The type of each column, or all that is wrong with the file."""
    kinds: list[Kind] = []
    problems: list[Problem] = []
    count = 0
    for item in rows_of(stream):
        if isinstance(item, Problem):
            problems.append(item)
        elif not kinds:
            kinds = [Kind.UNKNOWN] * len(item)
            problems.extend(bad_header(item))
        else:
            count += 1
            for index, cell in enumerate(item):
                if kinds[index] is not Kind.TEXT:
                    kinds[index] = joined(kinds[index], kind_of(cell))
    if not problems and not count:
        problems.append(Problem("is empty: a dataset needs at least one record"))
    return problems or kinds


def csv_records(stream: BinaryIO, kinds: Sequence[Kind]) -> Iterator[dict[str, Any]]:
    """The records of a file without problems."""
    rows = (item for item in rows_of(stream) if not isinstance(item, Problem))
    header = next(rows)
    convert = [CONVERT[kind] for kind in kinds]
    for row in rows:
        yield {name: make(cell) for name, make, cell in zip(header, convert, row, strict=True)}


def bad_header(header: Sequence[str]) -> Iterator[Problem]:
    if len(header) == 1 and (separators := [separator for separator in OTHERS if separator in header[0]]):
        name = "a tab" if separators[0] == "\t" else f"'{separators[0]}'"
        yield Problem(f"columns seem to be separated by {name}: write the file with commas", "line 1")
    for index, name in enumerate(header):
        if not name:
            yield Problem(f"column {index + 1} has no name", "line 1")
        elif name in header[:index]:
            yield Problem(f"two columns are called '{name}'", "line 1")


def rows_of(stream: BinaryIO) -> Iterator[list[str] | Problem]:
    """The header, then rows with as many cells, or what is wrong with them. Empty lines are none."""
    csv.field_size_limit(sys.maxsize)  # of the whole module: its 128 KiB are less than texts have
    reader = csv.reader(io.TextIOWrapper(stream, "utf-8-sig", newline=""), strict=True)
    width = 0
    while True:
        try:
            row = next(reader)
        except StopIteration:
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
            yield Problem(f"has {len(row)} cells, the first line has {width}", f"line {reader.line_num}")
            continue
        width = len(row)
        yield row
