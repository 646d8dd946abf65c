"""`hanzo-ml run`: tracked runs side by side."""

from typing import Annotated

import typer

from hanzo_ml.cli.connection import call
from hanzo_ml.cli.output import AsJson, show, table

app = typer.Typer(no_args_is_help=True, help=__doc__)


@app.command()
def get(run_id: str) -> None:
    """One run, whole: params, latest metrics, artifacts."""
    show(call("GET", f"/v1/runs/{run_id}"))


@app.command()
def compare(
    run_ids: list[str],
    metrics: Annotated[str, typer.Option(help="Comma-separated keys.")] = "train/loss,eval/loss",
    as_json: AsJson = False,
) -> None:
    """The newest value of each metric, one row a run."""
    keys = metrics.split(",")
    rows = []
    for run_id in run_ids:
        newest: dict[str, float] = {}
        for point in call("GET", f"/v1/runs/{run_id}")["metrics"]:
            newest[point["key"]] = point["value"]
        rows.append({"run": run_id, **{key: newest.get(key) for key in keys}})
    if as_json:
        show(rows)
        return
    table(("run", *keys), [tuple("-" if cell is None else cell for cell in row.values()) for row in rows], "no run")
