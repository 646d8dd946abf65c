"""How commands print: a table for people, one JSON document with `--json`."""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from hanzo_ml.cli.terminal import plain

WHOLE = ("job", "run", "sweep", "dataset", "model", "recipe", "checks")
"""Columns of names and of verdicts, which a narrow console does not cut."""

FOR_PROGRAMS = 10_000
"""Columns where no terminal reads: cut at 80, one row was six lines, of which `grep` found one."""

CONTROL = re.compile("[\\x7f-\\x9f]")
"""Characters that JSON may have as they are, and on which a terminal acts."""

GAP = 2
"""Between two columns."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, for machines.")]


def show(document: Any) -> None:
    print(shown_json(json.dumps(document, indent=2, ensure_ascii=False)))


def shown_json(text: str) -> str:
    """The same JSON, on which no terminal acts."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str, *, across: bool = False) -> None:
    """Rows as a table; `empty` says what to do where there are none. What is read `across` stays side by side."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else FOR_PROGRAMS
    console = Console(highlight=False, markup=False, width=width)  # a name may look like markup
    lines = [[plain(str(cell)) for cell in row] for row in rows]
    if not lines:
        console.print(empty)
        return
    least = narrowest(columns, lines)
    spare = console.width - sum(least) - GAP * (len(columns) - 1)
    if not across and spare < 0:
        for line in lines:
            console.print("\n".join((f"{columns[0]} {line[0]}", *below(columns[1:], line[1:]))))
        return
    drawn = Table(box=None, pad_edge=False)
    for column, width in zip(columns, widths(least, columns, lines, spare), strict=True):
        drawn.add_column(column, overflow="fold", no_wrap=column in WHOLE, width=width)
    for line in lines:
        drawn.add_row(*line)
    console.print(drawn)


def narrowest(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column below which its heading is broken: of a sweep of four hyperparameters, one was four lines."""
    cells = zip(columns, zip(*lines, strict=True), strict=True)
    return [max(map(cell_len, (*name.split(), *(cell if name in WHOLE else ())))) for name, cell in cells]


def widths(least: Sequence[int], columns: Sequence[str], lines: Sequence[Sequence[str]], spare: int) -> Sequence[int | None]:
    """The width of each column: its least, and its share of the columns that are to `spare` beside those. Where the least
    does not fit the library decides; left to itself, it breaks a heading in a word beside a column with room.
    """
    if spare < 0:
        return [None] * len(columns)
    cells = zip(columns, zip(*lines, strict=True), strict=True)
    whole = [max(cell_len(line) for text in (name, *cell) for line in text.split("\n")) for name, cell in cells]
    wanted = [most - low for most, low in zip(whole, least, strict=True)]
    found = list(least)
    for done, place in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        share = min(wanted[place], spare // (len(wanted) - done))
        found[place] += share
        spare -= share
    return found


def below(columns: Sequence[str], line: Sequence[str]) -> Iterator[str]:
    """The cells of a row one below the other, but for those that are empty."""
    longest = max(map(len, columns), default=0)
    return (f"  {name:<{longest}}  {cell}" for name, cell in zip(columns, line, strict=True) if cell)
