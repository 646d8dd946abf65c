"""`hanzo-ml experiment`: what was tried."""

import typer

from hanzo_ml.cli.connection import pages
from hanzo_ml.cli.output import AsJson, show, table

app = typer.Typer(no_args_is_help=True, help=__doc__)


@app.callback()
def experiments() -> None:
    """What was tried."""


@app.command("list")
def list_experiments(as_json: AsJson = False) -> None:
    """All experiments, with the GPU hours of their runs."""
    found = list(pages("/v1/experiments", "experiments", {}))
    if as_json:
        show(found)
        return
    rows = [(item["id"], item["name"], f"{item['gpu_hours']:.2f}") for item in found]
    table(("id", "name", "gpu hours"), rows, "no experiment yet")
