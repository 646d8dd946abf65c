"""How commands print: a table for people, one JSON document with `--json`."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

WHOLE = ("job", "run", "sweep", "dataset", "model", "recipe", "checks")
"""Columns of names and of verdicts, which a narrow console does not cut."""

FOR_PROGRAMS = 10_000
"""Columns where no terminal reads: cut at 80, one row was six lines, of which `grep` found one."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, for machines.")]


def show(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str, *, across: bool = False) -> None:
    """Rows as a table; `empty` says what to do where there are none. What is read `across` stays side by side."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else FOR_PROGRAMS
    console = Console(highlight=False, markup=False, width=width)  # a name may look like markup
    lines = [[str(cell) for cell in row] for row in rows]
    if not lines:
        console.print(empty)
        return
    if not across and narrowest(columns, lines) > console.width:
        for line in lines:
            console.print("\n".join((f"{columns[0]} {line[0]}", *below(columns[1:], line[1:]))))
        return
    drawn = Table(box=None, pad_edge=False)
    for column in columns:
        drawn.add_column(column, overflow="fold", no_wrap=column in WHOLE)
    for line in lines:
        drawn.add_row(*line)
    console.print(drawn)


def narrowest(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    """The width below which not even the headings can be read: of a sweep of four hyperparameters, one was four lines."""
    cells = zip(columns, zip(*lines, strict=True), strict=True)
    least = (max(map(len, (*name.split(), *(cell if name in WHOLE else ())))) for name, cell in cells)
    return sum(least) + 2 * (len(columns) - 1)


def below(columns: Sequence[str], line: Sequence[str]) -> Iterator[str]:
    """The cells of a row one below the other, but for those that are empty."""
    longest = max(map(len, columns), default=0)
    return (f"  {name:<{longest}}  {cell}" for name, cell in zip(columns, line, strict=True) if cell)
