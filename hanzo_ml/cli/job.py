"""`hanzo-ml job`: submit, look, follow, cancel, resume."""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from hanzo_ml.cli.code_snapshot import take_code_along
from hanzo_ml.cli.config_errors import about
from hanzo_ml.cli.connection import Refused, call, pages, stream
from hanzo_ml.cli.idempotency import Key, start
from hanzo_ml.cli.job_polling import begun_job
from hanzo_ml.cli.json_values import check_json
from hanzo_ml.cli.local import module
from hanzo_ml.cli.output import AsJson, show, table
from hanzo_ml.cli.terminal import in_colour
from recipes.contracts.job import BadConfiguration
from recipes.contracts.yaml_reader import read_mapping
from recipes.yaml_document import yaml_document
from recipes.yaml_lines import NO_YAML

app = typer.Typer(no_args_is_help=True, help=__doc__)


Config = Annotated[
    Path | None,
    typer.Option(
        help="A YAML file: name, model, dataset, recipe, parameters. Or, for a script of your own: name, command, code, "
        "env, resources, distributed, storage, schedule."
    ),
]
Model = Annotated[str | None, typer.Option(help="A model definition; enough by itself.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the recipe; may be repeated.")]


@app.command()
def submit(
    config: Config = None,
    model: Model = None,
    set_: Changes = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the Kubernetes objects of the job as YAML, and submit nothing.")
    ] = False,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Queue a job: fine-tuning by a recipe, or a script of your own.

    A file with a list `command:`, such as torchrun, --nproc_per_node=2, train.py,
    runs that as it is. `code: ./src` takes that folder (or file) along; without
    it, the files beside it that the command names.

    The script finds its run in MLFLOW_TRACKING_URI and MLFLOW_RUN_ID, a folder
    that outlives a restart in HANZO_ML_CHECKPOINTS, and the dataset that
    `storage:` names in HANZO_ML_DATASETS.
    """
    document = document_of(config, model, set_)
    if dry_run:
        if as_json:
            raise Refused("--dry-run prints YAML, for people and for kubectl: leave out --json")
        if "command" in document:
            module("hanzo_ml_assets.dry_run_command", given=json.dumps(document))
        else:
            module("hanzo_ml_assets.dry_run", json.dumps(document))
        return
    with about(document, None if model or set_ else config):
        job = start("/v1/jobs", key, json=document)
    show(job) if as_json else print(f"{job['id']} {job['status']}")


def document_of(config: Path | None, model: str | None, set_: list[str] | None) -> dict[str, Any]:
    """The body of `POST /v1/jobs` from the options of a command. Raises Refused where it is none."""
    document = read(config) if config else {}
    if config and "command" in document:
        return command_document(config, document, model, set_)
    if model:
        document["model"] = model
    if "name" not in document and "model" not in document:
        raise Refused("say which model: --model NAME, or `name:` and `dataset:` in the --config file")
    document.setdefault("name", document.get("model"))
    if document.get("parameters") is None:  # all of them commented out
        document["parameters"] = {}
    if set_:
        if not isinstance(document["parameters"], dict):
            raise Refused(f"`parameters:` in {config} must be a mapping of the recipe's keys")
        document["parameters"] |= dict(assignment(text) for text in set_)
    check_json(document, config)
    return document


def command_document(config: Path, document: dict[str, Any], model: str | None, set_: list[str] | None) -> dict[str, Any]:
    """The body for a file with a command, whose source files it takes along."""
    if model or set_:
        raise Refused(f"{config} has a `command:`, which takes neither --model nor --set: put arguments into it")
    take_code_along(config, document)
    check_json(document, config)
    return document


def read(path: Path) -> dict[str, Any]:
    """A YAML file of one mapping. Raises Refused where it is none."""
    if path.is_dir():
        raise Refused(f"{path} is a folder: name a file in it")
    if not path.is_file():
        raise Refused(f"there is no file {path}: check --config")
    try:
        return read_mapping(path)[1]
    except BadConfiguration as problem:
        raise Refused(str(problem)) from None


def assignment(text: str) -> tuple[str, Any]:
    """`learning_rate=1e-4` -> ("learning_rate", 0.0001)."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise Refused(f"--set {text}: write KEY=VALUE, such as learning_rate=1e-4")
    try:
        return key, float(value) if not value.lstrip("-").isdigit() else int(value)
    except ValueError:
        pass
    try:
        return key, yaml_document(value)
    except NO_YAML:
        raise Refused(f"--set {text}: the value is not valid YAML") from None


@app.command("list")
def list_jobs(
    status: Annotated[str | None, typer.Option(help="queued, running, completed, failed or cancelled")] = None,
    as_json: AsJson = False,
) -> None:
    """All jobs, newest first."""
    jobs = list(pages("/v1/jobs", "jobs", {"status": status} if status else {}))
    if as_json:
        show(jobs)
        return
    rows = [(job["id"], job["name"], job["status"], when(job["submitted_at"]), job["reason"]) for job in jobs]
    nothing = f"no job is {status}" if status else "no job yet: `hanzo-ml job submit --model NAME`"
    table(("job", "name", "status", "submitted", "reason"), rows, nothing)


@app.command()
def get(job_id: str) -> None:
    """One job, whole."""
    show(call("GET", f"/v1/jobs/{job_id}"))


@app.command()
def logs(job_id: str, follow: Annotated[bool, typer.Option("--follow", help="Until the job ends.")] = False) -> None:
    """The log of the job's program."""
    if follow:
        begun_job(job_id)
    event = ""
    for line in stream(f"/v1/jobs/{job_id}/logs", params={"follow": follow}):
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith("data: ") and event != "end":
            print(in_colour(line.removeprefix("data: ")), flush=True)


@app.command()
def cancel(job_id: str) -> None:
    """End a job; it saves a checkpoint first."""
    print(f"{job_id} {call('POST', f'/v1/jobs/{job_id}/cancel')['status']}")


@app.command()
def resume(
    job_id: str,
    from_: Annotated[str, typer.Option("--from", help="A checkpoint: latest, best, or its step.")] = "latest",
    gpus: Annotated[
        int | None, typer.Option(help="Go on with so many, of all nodes; where there is none, processes.")
    ] = None,
) -> None:
    """Go on with a job that failed or was cancelled.

    From `best` or a step, what the job did after that checkpoint stays in the
    store, and its steps are logged once more. With another number of GPUs it sees
    the same samples in the same order. A trial goes on when its sweep has ended.
    """
    if from_ not in ("latest", "best") and not from_.isdigit():
        raise Refused(f"--from {from_}: say latest, best, or the step of a checkpoint")
    body = {"resume_from": int(from_) if from_.isdigit() else from_, "gpus": gpus}
    print(f"{job_id} {call('POST', f'/v1/jobs/{job_id}/resume', json=body)['status']}")


def when(milliseconds: int) -> str:
    """A point in time where the user is: as the logs of jobs and both web UIs tell it."""
    return datetime.fromtimestamp(milliseconds / 1000).strftime("%Y-%m-%d %H:%M:%S")
