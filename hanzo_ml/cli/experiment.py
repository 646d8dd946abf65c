"""`hanzo-ml experiment`: what was tried."""

import typer

from hanzo_ml.cli.connection import call
from hanzo_ml.cli.output import AsJson, show, table

app = typer.Typer(no_args_is_help=True, help=__doc__)


@app.callback()
def experiments() -> None:
    """What was tried."""


@app.command("list")
def list_experiments(as_json: AsJson = False) -> None:
    """All experiments."""
    found = call("GET", "/v1/experiments")["experiments"]
    if as_json:
        show(found)
        return
    table(("id", "name"), [(item["id"], item["name"]) for item in found], "no experiment yet")
