"""List, compare and replay tracked runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from hanzo_ml.cli.connection import KeyOption, Refused, call, iterate_pages, start_once
from hanzo_ml.cli.job import format_time
from hanzo_ml.cli.job_polling import print_note, wait_for_end, wait_for_start
from hanzo_ml.cli.output import JsonOption, print_json, print_table, sanitize_text
from recipes.contracts.validation_errors import suggest_spelling

RunId = Annotated[str, typer.Argument(help="Id of the run, as `run list` shows it.")]

# `hanzo-ml experiment`

experiment_app = typer.Typer(no_args_is_help=True, help="List experiments.")


@experiment_app.callback()
def experiments() -> None:
    """List experiments."""


@experiment_app.command("list")
def list_experiments(as_json: JsonOption = False) -> None:
    """List experiments with the GPU hours of their runs."""
    found = list(iterate_pages("/v1/experiments", "experiments", {}))
    if as_json:
        print_json(found)
        return
    rows = [(item["id"], item["name"], f"{item['gpu_hours']:.2f}") for item in found]
    print_table(("id", "name", "gpu hours"), rows, "no experiment yet")


# `hanzo-ml run replay`


def replay(run_id: RunId, key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Train a finished run again and compare the two.

    Exits with 1 if a loss or the final weights differ.

    The new run is trained like any job, and is neither evaluated nor registered.
    With the id of a replay, wait for that replay or show its verdict.
    """
    job = run_id if is_replay(run_id) else submit_replay(run_id, key)
    wait_for_start(job)
    ended = wait_for_end(job)
    if ended["status"] != "completed":
        raise Refused(f"replay {job} {ended['status']}: {ended['reason']}")
    verdict = call("GET", f"/v1/runs/{job}/replay")
    if as_json:
        print_json(verdict)
    else:
        print(sanitize_text("\n".join(verdict_lines(verdict))))
    if not verdict["equal"]:
        raise typer.Exit(1)


def is_replay(run_id: str) -> bool:
    """Whether a run is a replay itself, whose verdict can be read again."""
    try:
        return bool(call("GET", f"/v1/jobs/{run_id}")["config"].get("replay_of"))
    except Refused:  # submitting the replay reports what the run lacks
        return False


def submit_replay(run_id: str, key: str | None) -> str:
    """Submit a job that trains the run again. Returns its id."""
    submitted = start_once(f"/v1/runs/{run_id}/replay", key)
    job = str(submitted["job"]["id"])
    for line in environment_lines(submitted["environment"]):
        print_note(line)
    print_note(f"replaying {run_id} as {job}: `hanzo-ml job logs {job} --follow` shows it")
    print_note(f"waiting for it; if interrupted, `hanzo-ml run replay {job}` waits again")
    return job


def environment_lines(differences: list[dict[str, str]]) -> list[str]:
    """A heading and one line per difference; empty if there is none."""
    if not differences:
        return []
    report = [f"  {each['what']}: {each['then']} then, {each['now']} now" for each in differences]
    return ["the environment differs from that of the first run, so results may differ:", *report]


def recovery_lines(unrepeated: list[dict[str, Any]]) -> list[str]:
    """A heading and one line per recovery that only one run had, if any."""
    if not unrepeated:
        return []
    other = {"run": "in the first run, not in the replay", "replay": "in the replay, not in the first run"}
    report = [f"  {other[each['of']]}: {each['what']}" for each in unrepeated]
    return ["only one of the runs recovered from something, so results may differ from there on:", *report]


def verdict_lines(verdict: dict[str, Any]) -> list[str]:
    """A verdict as text: the result, then what may explain it."""
    first = verdict["first_difference"]
    if first is None:
        steps = verdict["steps"]
        losses = "the one loss is equal" if steps == 1 else f"all {steps:,} losses are equal"
    else:
        losses = f"step {first['step']} is the first that differs: loss {first['then']} then, {first['now']} now"
    untrue = verdict["untrue"]
    weights = [f"{each['path']} has SHA-256 {each['now']}, then {each['then']}" for each in verdict["weights"]]
    report = [
        "reproduced" if verdict["equal"] else "not reproduced",
        losses,
        *([describe_changed_loss(untrue)] if untrue else []),
        *(weights or ["the final weights are equal"]),
    ]
    why = [*recovery_lines(verdict["unrepeated"]), *environment_lines(verdict["environment"])]
    return [f"{report[0]}: {report[1]}", *report[2:], *why]


def describe_changed_loss(found: dict[str, Any]) -> str:
    step, now, then = found["step"], found["now"], found["then"]
    return f"step {step} of the first run is tracked with loss {now}, and had {then}: it was changed since"


app = typer.Typer(no_args_is_help=True, help=__doc__)

RUN_FIELDS = {
    "name": "name",
    "status": "status",
    "seconds": "duration_seconds",
    "gpu hours": "gpu_hours",
    "commit": "git_commit",
}
ALWAYS_SHOWN_PARAMS = ("learning_rate",)
"""Params that are shown even if they are equal."""
DEFAULT_METRICS = "train/loss,eval/loss"
EPOCH_METRICS = ("epoch", "train/epoch")
"""The metric as transformers' callback logs it, without and with the prefix of training."""


@app.command("list")
def list_runs(
    experiment: Annotated[str | None, typer.Option(help="Only runs of this experiment, by name or id.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List runs by experiment, newest first."""
    everywhere = iterate_pages("/v1/experiments", "experiments", {})
    asked = [each for each in everywhere if experiment in (None, each["name"], each["id"])]
    if experiment is not None and not asked:
        raise Refused(f"there is no experiment '{experiment}': see `hanzo-ml experiment list`")
    found = [
        (each["name"], run) for each in asked for run in iterate_pages(f"/v1/experiments/{each['id']}/runs", "runs", {})
    ]
    if as_json:
        print_json([run for _, run in found])
        return
    rows = [(run["id"], run["name"], name, run["status"], format_time(run["started_at"])) for name, run in found]
    print_table(("run", "name", "experiment", "status", "started"), rows, "no run yet: `hanzo-ml job submit --model NAME`")


@app.command()
def get(run_id: RunId) -> None:
    """Show params, latest metrics and artifacts of a run, as JSON."""
    print_json(call("GET", f"/v1/runs/{run_id}"))


@app.command()
def compare(
    run_ids: Annotated[list[str], typer.Argument(help="Two or more run ids, as `run list` shows them.")],
    metrics: Annotated[str, typer.Option(help="Metrics to show, separated by commas.")] = DEFAULT_METRICS,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: duration, GPU hours, differing params, epoch, newest metrics."""
    if len([run for ids in run_ids for run in ids.split(",") if run.strip()]) < 2:
        raise Refused("two or more runs are needed: `hanzo-ml run compare RUN RUN`, with ids that `hanzo-ml run list` shows")
    found = call("GET", "/v1/runs/compare", params={"ids": run_ids})
    if as_json:
        print_json(found)
        return
    runs = found["runs"]
    wanted = [key.strip() for key in metrics.split(",")]
    rows = [[name, *("-" if cell is None else cell for cell in cells)] for name, cells in comparison_lines(found, wanted)]
    print_table(("run", *(run["id"] for run in runs)), rows, "no run", across=True)
    logged = sorted({key for run in runs for key in run["metrics"]})
    for key in wanted if logged and metrics != DEFAULT_METRICS else ():
        if key not in logged:
            meant = suggest_spelling(key, logged)
            hint = f"did you mean '{meant}'?" if meant else f"they have {', '.join(logged)}"
            print_note(f"none of these runs has a metric '{key}': {hint}")


def comparison_lines(found: Mapping[str, Any], metrics: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """Rows of a comparison: a name, and a value for each run."""
    runs = found["runs"]
    for name, key in RUN_FIELDS.items():
        yield name, [run[key] for run in runs]
    for key in dict.fromkeys([*ALWAYS_SHOWN_PARAMS, *found["differences"]["params"]]):
        yield key, [run["params"].get(key) for run in runs]
    epochs = [next((run["metrics"][key] for key in EPOCH_METRICS if key in run["metrics"]), None) for run in runs]
    yield "epoch", epochs
    for key in metrics:
        yield key, [run["metrics"].get(key) for run in runs]
