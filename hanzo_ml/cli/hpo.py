"""Search for good hyperparameters."""

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hanzo_ml.cli import connection
from hanzo_ml.cli.config_errors import check_json, locate_refusal
from hanzo_ml.cli.connection import KeyOption, Refused, call, iterate_pages
from hanzo_ml.cli.job import format_time, read_config
from hanzo_ml.cli.output import JsonOption, print_json, print_table, sanitize_text
from recipes.contracts.quantities import pluralize

# Export of a sweep as an Optuna study. Optuna is imported on demand, because the client package does not install it.

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

HISTORY_PATH = "/api/2.0/mlflow/metrics/get-history"
MAX_DOUBLE = 1.7976931348623157e308
"""How the server encodes infinity, as MLflow does."""
TRIAL_ATTRIBUTES = ("run_id", "status", "reason", "generation", "member", "start_from")
"""Values without a field in Optuna, stored as user attributes of each trial."""


def export_study(sweep: Mapping[str, Any], trials: Sequence[Mapping[str, Any]], storage: str) -> "Study":
    """Write the sweep as a study into a database, replacing an earlier export.

    Args:
        storage: an address as SQLAlchemy has them, `sqlite:///study.db`, or the path of a SQLite file.

    Raises:
        Refused: Optuna is not installed, or the database cannot be opened.
    """
    try:
        import optuna
    except ImportError:
        raise Refused("this needs Optuna: `pip install optuna`") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    name = f"{sweep['experiment']}-{sweep['id']}"
    objective, space = sweep["objective"], sweep["config"]["search_space"]
    try:
        database = optuna.storages.RDBStorage(storage if "://" in storage else f"sqlite:///{storage}")
        if name in optuna.get_all_study_names(database):
            optuna.delete_study(study_name=name, storage=database)
        study = optuna.create_study(storage=database, study_name=name, direction=objective["direction"])
    except Exception as error:  # of SQLAlchemy, of a driver, or that a driver is not there
        raise Refused(f"Optuna cannot write to the database of --to: {str(error).splitlines()[0]}") from None
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        study.set_metric_names([objective["metric"]])
    study.set_user_attr("sweep", sweep["id"])
    study.set_user_attr("strategy", sweep["strategy"])
    distributions = {key: make_distribution(dimension) for key, dimension in space.items()}
    study.add_trials(
        [make_trial(trial, distributions, read_evaluations(trial["run_id"], objective["metric"])) for trial in trials]
    )
    return study


def read_evaluations(run_id: str, metric: str) -> dict[int, float]:
    """The objective by step; the later value of a step that was logged twice."""
    points = iterate_pages(HISTORY_PATH, "metrics", {"run_id": run_id, "metric_key": metric})
    values = {int(point["step"]): float(point["value"]) for point in points}
    return {step: math.copysign(math.inf, value) if abs(value) >= MAX_DOUBLE else value for step, value in values.items()}


def make_trial(
    trial: Mapping[str, Any], distributions: Mapping[str, "BaseDistribution"], values_by_step: Mapping[int, float]
) -> "FrozenTrial":
    """Convert a trial. Failed and cancelled trials become FAIL, trials that have not ended RUNNING.

    What a trial logged after its early stop is left out.
    """
    from optuna.trial import FrozenTrial, TrialState

    states = {"completed": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    ended = trial["ended_at"] is not None
    last = math.inf if trial["step"] is None else trial["step"]
    state = states.get(trial["status"], TrialState.FAIL) if ended else TrialState.RUNNING
    return FrozenTrial(
        number=trial["number"],
        trial_id=0,
        state=state,
        value=trial["value"] if state in states.values() else None,
        datetime_start=to_local_time(trial["created_at"]),
        datetime_complete=to_local_time(trial["ended_at"]) if ended else None,
        params={name: to_category(value) for name, value in trial["params"].items()},
        distributions=dict(distributions),
        user_attrs={key: trial[key] for key in TRIAL_ATTRIBUTES},
        system_attrs={},
        intermediate_values={
            step: value for step, value in values_by_step.items() if state != TrialState.PRUNED or step <= last
        },
    )


def to_local_time(milliseconds: int) -> datetime:
    """Local time without a zone, as Optuna stores it."""
    return datetime.fromtimestamp(milliseconds / 1000)


def to_category(value: Any) -> Any:
    """A value that Optuna can store; it has no lists, so those become JSON."""
    return json.dumps(value) if isinstance(value, list) else value


def make_distribution(dimension: Mapping[str, Any]) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if dimension["type"] == "choice":
        return CategoricalDistribution([to_category(value) for value in dimension["values"]])
    return FloatDistribution(dimension["min"], dimension["max"], log=dimension["type"] == "log_uniform")


app = typer.Typer(no_args_is_help=True, help=__doc__)
EXPLAINED_STATUSES = ("failed", "queued", "running")
"""Statuses whose reason is shown, so that a sweep that waits for its store says so."""
ID_PATTERN = re.compile(r"\b[0-9a-f]{8}(-?)(?:[0-9a-f]{4}\1){3}[0-9a-f]{12}\b")
SweepId = Annotated[str, typer.Argument(help="Id of the sweep, as `hpo list` shows it.")]
SWEEP_FILE_HELP = "Sweep file (YAML) with experiment, base_config, search_space, strategy, objective."


@app.command()
def start(
    file: Annotated[Path | None, typer.Argument(help=SWEEP_FILE_HELP)] = None,
    config: Annotated[Path | None, typer.Option(help="Sweep file (YAML); the same as the argument FILE.")] = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a sweep."""
    path = file or config
    if path is None or (file and config):
        raise Refused("exactly one sweep file is needed: `hanzo-ml hpo start --config FILE`")
    document = read_config(path)
    check_json(document, path)
    with locate_refusal(document, path):
        sweep = connection.start_once("/v1/hpo", key, json=document)
    print_json(sweep) if as_json else print(f"{sweep['id']} {sweep['status']}")


@app.command()
def results(
    sweep_id: SweepId,
    top: Annotated[int, typer.Option(min=1, help="Number of best trials to show.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Show the progress of a sweep and its best trials."""
    sweep = call("GET", f"/v1/hpo/{sweep_id}")
    trials = list(iterate_pages(f"/v1/hpo/{sweep_id}/trials", "trials", {}))
    best = rank_trials(trials, sweep["objective"]["direction"])[:top]
    if as_json:
        print_json({**sweep, "results": best})
        return
    Console(highlight=False, markup=False, soft_wrap=True).print(sanitize_text(describe_sweep(sweep)))
    names = list(sweep["config"]["search_space"])
    columns = ("trial", "run", "status", sweep["objective"]["metric"], "step", *names)
    rows = [
        [trial["number"], trial["run_id"], trial["status"], format_number(trial["value"]), trial["step"]] for trial in best
    ]
    values = [[format_value(trial["params"][name]) for name in names] for trial in best]
    print_table(columns, [[*row, *params] for row, params in zip(rows, values, strict=True)], "no trial has a value yet")
    for reason in summarize_reasons(trials):
        Console(highlight=False, markup=False, soft_wrap=True).print(sanitize_text(reason))


def describe_sweep(sweep: dict[str, Any]) -> str:
    """Count trials by status, and say why the sweep ended."""
    counts = ", ".join(f"{count} {status}" for status, count in sorted(sweep["trials"].items()))
    line = f"{sweep['id']} {sweep['status']}: {counts or 'no trial'} of {sweep['max_trials']} by {sweep['strategy']}"
    return f"{line}: {sweep['reason']}" if sweep["reason"] else line


def summarize_reasons(trials: list[dict[str, Any]]) -> list[str]:
    """Reasons why trials failed or wait, most frequent first.

    Reasons that differ only in run ids are counted as one.
    """
    by_reason: dict[tuple[str, str], list[str]] = {}
    for trial in trials:
        if trial["status"] in EXPLAINED_STATUSES and trial["reason"]:
            by_reason.setdefault((trial["status"], ID_PATTERN.sub("", trial["reason"])), []).append(trial["reason"])
    by_count = sorted(by_reason.items(), key=lambda each: len(each[1]), reverse=True)
    return [f"{len(similar)} {status}: {similar[-1]}" for (status, _), similar in by_count]


def rank_trials(trials: list[dict[str, Any]], direction: str) -> list[dict[str, Any]]:
    """Completed and pruned trials with a value, best first."""
    valued = [trial for trial in trials if trial["value"] is not None and trial["status"] in ("completed", "pruned")]
    return sorted(valued, key=lambda trial: trial["value"], reverse=direction == "maximize")


def format_value(value: Any) -> str:
    """Format a value as one line of YAML."""
    if isinstance(value, list):
        return f"[{', '.join(map(format_number, value))}]"
    return "null" if value is None else format_number(value)


def format_number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


@app.command("list")
def list_sweeps(
    status: Annotated[
        str | None, typer.Option(help="Only sweeps with this status: running, completed, failed or cancelled.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List sweeps, newest first."""
    sweeps = list(iterate_pages("/v1/hpo", "sweeps", {"status": status} if status else {}))
    if as_json:
        print_json(sweeps)
        return
    rows = [
        (
            sweep["id"],
            sweep["experiment"],
            sweep["strategy"],
            sweep["status"],
            format_time(sweep["created_at"]),
            sweep["reason"],
        )
        for sweep in sweeps
    ]
    columns = ("sweep", "experiment", "strategy", "status", "started", "reason")
    print_table(columns, rows, "no sweep yet: `hanzo-ml hpo start --config FILE`")


@app.command()
def cancel(sweep_id: SweepId) -> None:
    """Cancel a sweep and its running trials."""
    print(f"{sweep_id} {call('POST', f'/v1/hpo/{sweep_id}/cancel')['status']}")


@app.command()
def export(
    sweep_id: SweepId,
    to: Annotated[str, typer.Option(help="Database for the study: sqlite:///study.db, a path, or another SQLAlchemy URL.")],
) -> None:
    """Export a sweep as an Optuna study, for optuna-dashboard, its plots and its importances."""

    sweep = call("GET", f"/v1/hpo/{sweep_id}")
    trials = list(iterate_pages(f"/v1/hpo/{sweep_id}/trials", "trials", {}))
    print(f"study {export_study(sweep, trials, to).study_name}: {pluralize(len(trials), 'trial')}")
