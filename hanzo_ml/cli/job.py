"""Submit, follow, cancel and resume jobs."""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from hanzo_ml.cli.code_snapshot import attach_code
from hanzo_ml.cli.config_errors import check_json, locate_refusal
from hanzo_ml.cli.connection import KeyOption, Refused, call, iterate_pages, start_once, stream_lines, tracking_uri
from hanzo_ml.cli.job_polling import wait_for_start
from hanzo_ml.cli.local import run_module
from hanzo_ml.cli.output import JsonOption, print_json, print_table, sanitize_log_line, sanitize_text
from recipes.contracts.job import BadConfiguration
from recipes.contracts.yaml_reader import YAML_ERRORS, load_yaml, read_yaml_mapping

app = typer.Typer(no_args_is_help=True, help=__doc__)


Config = Annotated[
    Path | None,
    typer.Option(
        help="Job file (YAML). For fine-tuning: name, model, dataset, recipe, parameters, schedule, env, pod. "
        "For a script of your own: name, command, code, env, resources, distributed, storage, schedule, pod."
    ),
]
Model = Annotated[str | None, typer.Option(help="Model definition of the asset graph; needs no --config.")]
JobId = Annotated[str, typer.Argument(help="Id of the job, as `job list` shows it.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, changes a key of the recipe; repeatable.")]


@app.command()
def submit(
    config: Config = None,
    model: Model = None,
    set_: Changes = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the Kubernetes objects of the job as YAML and submit nothing.")
    ] = False,
    keep_failed: Annotated[
        bool,
        typer.Option(
            "--keep-failed",
            help="On a cluster, keep the pods of a failed job for scheduler.keep_failed_for (24h by default).",
        ),
    ] = False,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Queue a job: fine-tuning by a recipe, or a script of your own.

    A job file with a list `command:`, such as torchrun, --nproc_per_node=2,
    train.py, runs that command as it is. `code: ./src` sends that folder or
    file along; by default, the files next to the job file that the command names.

    The script finds its run in MLFLOW_TRACKING_URI and MLFLOW_RUN_ID, a folder
    that survives restarts in HANZO_ML_CHECKPOINTS, and the dataset that
    `storage:` names in HANZO_ML_DATASETS.
    """
    document = build_document(config, model, set_)
    if keep_failed:
        set_keep_failed(document)
    if dry_run:
        if as_json:
            raise Refused("--dry-run prints YAML: remove --json")
        with locate_refusal(document, None if model or set_ else config):
            note = check_on_server(document)
        run_module("hanzo_ml_assets.dry_run", given=json.dumps({"job": document, "note": note}))
        return
    with locate_refusal(document, None if model or set_ else config):
        job = start_once("/v1/jobs", key, json=document)
    print_json(job) if as_json else print(f"{job['id']} {job['status']}")


def check_on_server(document: dict[str, Any]) -> str:
    """One line that says whether the server has checked the job.

    Raises:
        Refused: the server would refuse it.
    """
    try:
        call("POST", "/v1/jobs", params={"dry_run": "true"}, json=document)
    except httpx.TransportError:
        return (
            f"No server answers at {tracking_uri()}, so this was not checked: permissions and quotas there, whether the "
            "dataset fits the recipe, and whether the base model can be read."
        )
    return f"{tracking_uri()} would accept it."


def build_document(config: Path | None, model: str | None, set_: list[str] | None) -> dict[str, Any]:
    """Build the body of `POST /v1/jobs`.

    Raises Refused if the options do not describe a job.
    """
    document = read_config(config) if config else {}
    if config and "command" in document:
        return build_command_document(config, document, model, set_)
    if model:
        document["model"] = model
    if "name" not in document and "model" not in document:
        raise Refused("no model is named: use --model NAME, or `name:` and `dataset:` in the --config file")
    document.setdefault("name", document.get("model"))
    if document.get("parameters") is None:  # all of them commented out
        document["parameters"] = {}
    if set_:
        if not isinstance(document["parameters"], dict):
            raise Refused(f"`parameters:` in {config} must be a mapping of the recipe's keys")
        document["parameters"] |= dict(parse_assignment(text) for text in set_)
    check_json(document, config)
    return document


def build_command_document(
    config: Path, document: dict[str, Any], model: str | None, set_: list[str] | None
) -> dict[str, Any]:
    """Build the body for a job file with a command, source files included."""
    if model or set_:
        raise Refused(f"{config} has a `command:`, which accepts neither --model nor --set: put arguments into the command")
    attach_code(config, document)
    check_json(document, config)
    return document


def set_keep_failed(document: dict[str, Any]) -> None:
    """Set `pod.keep_failed`, keeping the other keys of `pod:`."""
    pod = document.get("pod") or {}
    if not isinstance(pod, dict):
        raise Refused("`pod:` must be a mapping, such as {keep_failed: true}")
    document["pod"] = {**pod, "keep_failed": True}


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping. Raises Refused otherwise."""
    if path.is_dir():
        raise Refused(f"{path} is a folder: use a file in it")
    if not path.is_file():
        raise Refused(f"there is no file {path}: check --config")
    try:
        return read_yaml_mapping(path)[1]
    except BadConfiguration as problem:
        raise Refused(str(problem)) from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """`learning_rate=1e-4` -> ("learning_rate", 0.0001)."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise Refused(f"--set {text}: write KEY=VALUE, such as learning_rate=1e-4")
    try:
        return key, float(value) if not value.lstrip("-").isdigit() else int(value)
    except ValueError:
        pass
    try:
        return key, load_yaml(value)
    except YAML_ERRORS:
        raise Refused(f"--set {text}: the value is not valid YAML") from None


@app.command("list")
def list_jobs(
    status: Annotated[
        str | None, typer.Option(help="Only jobs with this status: queued, running, completed, failed or cancelled.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List jobs, newest first."""
    jobs = list(iterate_pages("/v1/jobs", "jobs", {"status": status} if status else {}))
    if as_json:
        print_json(jobs)
        return
    rows = [(job["id"], job["name"], job["status"], format_time(job["submitted_at"]), job["reason"]) for job in jobs]
    nothing = f"no job is {status}" if status else "no job yet: `hanzo-ml job submit --model NAME`"
    print_table(("job", "name", "status", "submitted", "reason"), rows, nothing)


@app.command()
def get(job_id: JobId) -> None:
    """Show everything known of a job, as JSON."""
    print_json(call("GET", f"/v1/jobs/{job_id}"))


@app.command()
def logs(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", help="Keep printing new lines until the job ends.")] = False,
) -> None:
    """Print the log of a job."""
    if follow:
        wait_for_start(job_id)
    event = ""
    for line in stream_lines(f"/v1/jobs/{job_id}/logs", params={"follow": follow}):
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith("data: ") and event != "end":
            print(sanitize_log_line(line.removeprefix("data: ")), flush=True)


@app.command()
def cancel(job_id: JobId) -> None:
    """Cancel a job. It saves a checkpoint first."""
    print(f"{job_id} {call('POST', f'/v1/jobs/{job_id}/cancel')['status']}")


@app.command()
def resume(
    job_id: JobId,
    from_: Annotated[str, typer.Option("--from", help="Checkpoint to resume from: latest, best, or a step.")] = "latest",
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs on all nodes, or of processes without GPUs; as before by default.")
    ] = None,
) -> None:
    """Resume a job that failed or was cancelled.

    With `best` or a step, what the job did after that checkpoint stays in the
    store, and those steps are logged again. With another number of GPUs it sees
    the same samples in the same order. A trial can be resumed once its sweep has
    ended.
    """
    if from_ not in ("latest", "best") and not from_.isdigit():
        raise Refused(f"--from {from_} is not a checkpoint: use latest, best, or a step")
    body = {"resume_from": int(from_) if from_.isdigit() else from_, "gpus": gpus}
    print(f"{job_id} {call('POST', f'/v1/jobs/{job_id}/resume', json=body)['status']}")


def format_time(milliseconds: int) -> str:
    """A point in time in the user's time zone, as in job logs."""
    return datetime.fromtimestamp(milliseconds / 1000).strftime("%Y-%m-%d %H:%M:%S")


# `hanzo-ml job estimate`

GIB = 1024**3


def estimate(config: Config = None, model: Model = None, set_: Changes = None, as_json: JsonOption = False) -> None:
    """Estimate tokens, steps, memory, hours and dollars of a job.

    Refuses a job that cannot fit its memory.
    """
    document = build_document(config, model, set_)
    with locate_refusal(document, None if model or set_ else config):
        found = call("POST", "/v1/jobs/estimate", json=document)
    print_json(found) if as_json else print(sanitize_text("\n".join(estimate_lines(found))))


def estimate_lines(found: dict[str, Any]) -> list[str]:
    seed = found["seed_estimate"]
    most = "up to " if found["tokens"] < found["steps"] * found["tokens_per_step"] else ""
    report = [
        f"recipe    {found['recipe']} ({found['method']}, {found['objective']}) on {found['hardware']}",
        f"steps     {found['steps']:,} of {most}{found['tokens_per_step']:,} tokens: {found['tokens']:,} tokens",
        f"dataset   {describe_dataset(found)}",
        f"scaling   {describe_scaling(found)}",
        f"memory    {describe_memory(found['memory'])}",
        f"disk      {found['disk'] or 'not known'}",
        f"time      {format_range(found['hours'], format_hours)}",
        f"cost      {format_range(found['dollars'], format_dollars)}",
        f"source    {found['source']}",
        f"seed      {seed['time'] or '-'}, {seed['cost'] or '-'} (the recipe's own figures)",
    ]
    return report + [f"note      {note}" for note in found["notes"]]


def describe_dataset(found: dict[str, Any]) -> str:
    if found["dataset"] is None:
        return "not known"
    return f"{found['dataset']['count']:,} tokens ({found['dataset']['source']}); up to {found['epochs']:.1f} epochs"


def describe_scaling(found: dict[str, Any]) -> str:
    """Tokens per parameter, with the compute-optimal number for training from scratch.

    There is no such rule for fine-tuning.
    """
    if found["tokens_per_parameter"] is None:
        return "not known"
    which = "parameter" if found["method"] == "full" else "trained parameter"
    best = f"{found['compute_optimal_tokens_per_parameter']} per parameter are best from nothing (Hoffmann et al. 2022)"
    return f"{found['tokens_per_parameter']:,.3g} tokens per {which} ({found['trained_parameters']:,}); {best}"


def describe_memory(memory: dict[str, Any] | None) -> str:
    if memory is None:
        return "not known"
    there = f" of {memory['available'] / GIB:.1f} GiB" if memory["available"] else ""
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory["parts"].items() if size >= GIB / 200)
    return f"{memory['needed'] / GIB:.1f}{there} on {memory['where']} ({parts})"


def format_range(found: dict[str, float] | None, words: Any) -> str:
    return "not known" if found is None else f"{words(found['likely'])} ({words(found['low'])} to {words(found['high'])})"


def format_hours(value: float) -> str:
    """Format a duration in seconds, minutes, hours or days."""
    if value < 2 / 60:
        return f"{value * 3600:.0f} s"
    if value < 2:
        return f"{value * 60:.0f} min"
    return f"{value:.1f} h" if value < 100 else f"{value / 24:.1f} days"


def format_dollars(value: float) -> str:
    return f"${value:,.2f}" if value < 100 else f"${value:,.0f}"
