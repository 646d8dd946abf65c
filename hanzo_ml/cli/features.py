"""`hanzo-ml dataset features`: the numbers that a version's records have, of a key or of rows of one's own."""

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from hanzo_ml.cli.connection import Refused, call
from hanzo_ml.cli.output import show


def features(
    reference: Annotated[str, typer.Argument(metavar="NAME@VERSION", help="NAME alone is the newest with features.")],
    key: Annotated[str | None, typer.Option(help="Whose: a value of the column that the features name as key.")] = None,
    rows: Annotated[Path | None, typer.Option(help="A file of JSON lines: the features of each, prepared alike.")] = None,
) -> None:
    """Features of a key, or of rows that were never prepared, as JSON."""
    if (key is None) == (rows is None):
        raise Refused("give --key, or --rows with a file of JSON lines")
    name, at, number = reference.partition("@")
    if not name or (at and not number.isdecimal()):
        raise Refused(f"'{reference}' is no dataset: write NAME or NAME@VERSION, such as {name or 'my-data'}@1")
    params = {"version": number} if at else {}
    where = f"/v1/features/{quote(name, safe='')}"
    if rows is None:
        show(call("GET", f"{where}/{quote(key or '', safe='')}", params=params))
    else:
        show(call("POST", f"{where}/transform", params=params, json=rows_in(rows)))


def rows_in(path: Path) -> list[Any]:
    """Raises Refused for a line that is no JSON."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except ValueError as problem:
            raise Refused(f"{path}, line {number}: not JSON: {problem}") from None
    return found
