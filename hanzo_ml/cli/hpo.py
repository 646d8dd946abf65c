"""`hanzo-ml hpo`: search for good hyperparameters."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hanzo_ml.cli import idempotency
from hanzo_ml.cli.config_errors import about
from hanzo_ml.cli.connection import Refused, call, pages
from hanzo_ml.cli.idempotency import Key
from hanzo_ml.cli.job import read, when
from hanzo_ml.cli.json_values import check_json
from hanzo_ml.cli.output import AsJson, show, table
from hanzo_ml.cli.terminal import plain
from recipes.counted import counted

app = typer.Typer(no_args_is_help=True, help=__doc__)
SAY_WHY = ("failed", "queued", "running")
"""Trials that failed, or wait for something: a sweep whose store is away seems to do nothing."""
ID = re.compile(r"\b[0-9a-f]{8}(-?)(?:[0-9a-f]{4}\1){3}[0-9a-f]{12}\b")
SWEEP = "A YAML file: experiment, base_config, search_space, strategy, objective."


@app.command()
def start(
    file: Annotated[Path | None, typer.Argument(help=SWEEP)] = None,
    config: Annotated[Path | None, typer.Option(help="The same file.")] = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Start a sweep."""
    path = file or config
    if path is None or (file and config):
        raise Refused("give one sweep file: `hanzo-ml hpo start --config FILE`")
    document = read(path)
    check_json(document, path)
    with about(document, path):
        sweep = idempotency.start("/v1/hpo", key, json=document)
    show(sweep) if as_json else print(f"{sweep['id']} {sweep['status']}")


@app.command()
def results(
    sweep_id: str, top: Annotated[int, typer.Option(min=1, help="So many of the best trials.")] = 10, as_json: AsJson = False
) -> None:
    """How a sweep stands, and its best trials."""
    sweep = call("GET", f"/v1/hpo/{sweep_id}")
    trials = list(pages(f"/v1/hpo/{sweep_id}/trials", "trials", {}))
    best = ordered(trials, sweep["objective"]["direction"])[:top]
    if as_json:
        show({**sweep, "results": best})
        return
    Console(highlight=False, markup=False, soft_wrap=True).print(plain(standing(sweep)))
    names = list(sweep["config"]["search_space"])
    columns = ("trial", "run", "status", sweep["objective"]["metric"], "step", *names)
    rows = [[trial["number"], trial["run_id"], trial["status"], number(trial["value"]), trial["step"]] for trial in best]
    values = [[shown(trial["params"][name]) for name in names] for trial in best]
    table(columns, [[*row, *params] for row, params in zip(rows, values, strict=True)], "no trial has a value yet")
    for reason in reasons(trials):
        Console(highlight=False, markup=False, soft_wrap=True).print(plain(reason))


def standing(sweep: dict[str, Any]) -> str:
    """How many trials have come how far, and why it ended."""
    counts = ", ".join(f"{count} {status}" for status, count in sorted(sweep["trials"].items()))
    line = f"{sweep['id']} {sweep['status']}: {counts or 'no trial'} of {sweep['max_trials']} by {sweep['strategy']}"
    return f"{line}: {sweep['reason']}" if sweep["reason"] else line


def reasons(trials: list[dict[str, Any]]) -> list[str]:
    """Why trials failed, or wait, what most of them say first. Of those whose words differ by the ids of their runs alone,
    the newest says it for all.
    """
    saying: dict[tuple[str, str], list[str]] = {}
    for trial in trials:
        if trial["status"] in SAY_WHY and trial["reason"]:
            saying.setdefault((trial["status"], ID.sub("", trial["reason"])), []).append(trial["reason"])
    told = sorted(saying.items(), key=lambda each: len(each[1]), reverse=True)
    return [f"{len(said)} {status}: {said[-1]}" for (status, _), said in told]


def ordered(trials: list[dict[str, Any]], direction: str) -> list[dict[str, Any]]:
    """The trials whose value counts, the best first."""
    valued = [trial for trial in trials if trial["value"] is not None and trial["status"] in ("completed", "pruned")]
    return sorted(valued, key=lambda trial: trial["value"], reverse=direction == "maximize")


def shown(value: Any) -> str:
    """As YAML has it in one line, which is how it was written."""
    if isinstance(value, list):
        return f"[{', '.join(map(number, value))}]"
    return "null" if value is None else number(value)


def number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


@app.command("list")
def list_sweeps(
    status: Annotated[str | None, typer.Option(help="running, completed, failed or cancelled")] = None,
    as_json: AsJson = False,
) -> None:
    """All sweeps, newest first."""
    sweeps = list(pages("/v1/hpo", "sweeps", {"status": status} if status else {}))
    if as_json:
        show(sweeps)
        return
    rows = [
        (sweep["id"], sweep["experiment"], sweep["strategy"], sweep["status"], when(sweep["created_at"]), sweep["reason"])
        for sweep in sweeps
    ]
    columns = ("sweep", "experiment", "strategy", "status", "started", "reason")
    table(columns, rows, "no sweep yet: `hanzo-ml hpo start --config FILE`")


@app.command()
def cancel(sweep_id: str) -> None:
    """End a sweep, with the trials that run."""
    print(f"{sweep_id} {call('POST', f'/v1/hpo/{sweep_id}/cancel')['status']}")


@app.command()
def export(
    sweep_id: str,
    to: Annotated[str, typer.Option(help="Where: sqlite:///study.db, or another database as SQLAlchemy names it.")],
) -> None:
    """A sweep as a study of Optuna's own: for optuna-dashboard, its plots and its importances."""
    from hanzo_ml.cli import study

    sweep = call("GET", f"/v1/hpo/{sweep_id}")
    trials = list(pages(f"/v1/hpo/{sweep_id}/trials", "trials", {}))
    print(f"study {study.export(sweep, trials, to).study_name}: {counted(len(trials), 'trial')}")
