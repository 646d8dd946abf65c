"""`hanzo-ml run`: tracked runs side by side."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from hanzo_ml.cli.connection import Refused, call, pages
from hanzo_ml.cli.job import when
from hanzo_ml.cli.job_polling import tell
from hanzo_ml.cli.output import AsJson, show, table
from recipes.spelling import meant_by

app = typer.Typer(no_args_is_help=True, help=__doc__)

OF_A_RUN = {
    "name": "name",
    "status": "status",
    "seconds": "duration_seconds",
    "gpu hours": "gpu_hours",
    "commit": "git_commit",
}
ALWAYS = ("learning_rate",)
"""Params that are shown where they are the same too."""
METRICS = "train/loss,eval/loss"
EPOCHS = ("epoch", "train/epoch")
"""The metric as transformers' callback logs it, and below the prefix of training."""


@app.command("list")
def list_runs(
    experiment: Annotated[str | None, typer.Option(help="Only those of this experiment: its name or its id.")] = None,
    as_json: AsJson = False,
) -> None:
    """All runs, by experiment, the newest first."""
    everywhere = pages("/v1/experiments", "experiments", {})
    asked = [each for each in everywhere if experiment in (None, each["name"], each["id"])]
    if experiment is not None and not asked:
        raise Refused(f"there is no experiment '{experiment}': see `hanzo-ml experiment list`")
    found = [(each["name"], run) for each in asked for run in pages(f"/v1/experiments/{each['id']}/runs", "runs", {})]
    if as_json:
        show([run for _, run in found])
        return
    rows = [(run["id"], run["name"], name, run["status"], when(run["started_at"])) for name, run in found]
    table(("run", "name", "experiment", "status", "started"), rows, "no run yet: `hanzo-ml job submit --model NAME`")


@app.command()
def get(run_id: str) -> None:
    """One run, whole: params, latest metrics, artifacts."""
    show(call("GET", f"/v1/runs/{run_id}"))


@app.command()
def compare(
    run_ids: list[str],
    metrics: Annotated[str, typer.Option(help="Comma-separated keys.")] = METRICS,
    as_json: AsJson = False,
) -> None:
    """Runs side by side: duration, GPU hours, params that differ, epoch, and the newest value of each metric."""
    if len([run for ids in run_ids for run in ids.split(",") if run.strip()]) < 2:
        raise Refused("give two runs or more: `hanzo-ml run compare RUN RUN`, of those that `hanzo-ml run list` shows")
    found = call("GET", "/v1/runs/compare", params={"ids": run_ids})
    if as_json:
        show(found)
        return
    runs = found["runs"]
    wanted = [key.strip() for key in metrics.split(",")]
    rows = [[name, *("-" if cell is None else cell for cell in cells)] for name, cells in lines(found, wanted)]
    table(("run", *(run["id"] for run in runs)), rows, "no run", across=True)
    logged = sorted({key for run in runs for key in run["metrics"]})
    for key in wanted if logged and metrics != METRICS else ():
        if key not in logged:
            meant = meant_by(key, logged)
            hint = f"did you mean '{meant}'?" if meant else f"they have {', '.join(logged)}"
            tell(f"none of these runs has a metric '{key}': {hint}")


def lines(found: Mapping[str, Any], metrics: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """What is shown of a comparison: a name, and a value for each run."""
    runs = found["runs"]
    for name, key in OF_A_RUN.items():
        yield name, [run[key] for run in runs]
    for key in dict.fromkeys([*ALWAYS, *found["differences"]["params"]]):
        yield key, [run["params"].get(key) for run in runs]
    epochs = [next((run["metrics"][key] for key in EPOCHS if key in run["metrics"]), None) for run in runs]
    yield "epoch", epochs
    for key in metrics:
        yield key, [run["metrics"].get(key) for run in runs]
