"""`hanzo-ml dataset prepare`: a version filtered, masked, tokenized, split and shuffled, as a version of its own."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hanzo_ml.cli.config_errors import about
from hanzo_ml.cli.connection import Refused
from hanzo_ml.cli.dataset_reference import Reference, find, versions
from hanzo_ml.cli.idempotency import Key, start
from hanzo_ml.cli.job import read
from hanzo_ml.cli.job_polling import ended_job
from hanzo_ml.cli.json_values import check_json
from hanzo_ml.cli.output import AsJson, show
from recipes.counted import counted


def prepare(
    reference: Reference,
    config: Annotated[
        Path, typer.Option(help="A YAML file: clean, tokenize, filter, features, augment, split; name, workers.")
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Until the version is there.")] = False,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make a prepared version of another."""
    document = read(config)
    check_json(document, config)
    path = f"/v1/datasets/{find(reference)['id']}/prepare"
    with about(document, config):
        job = start(path, key, json=document)
    if wait:
        job = ended_job(job["id"])
    if job["status"] in ("failed", "cancelled"):
        raise Refused(f"job {job['id']} {job['status']}: {job['reason']}")
    if as_json:
        show(job)
    elif job["status"] == "completed":
        print(f"{made_by(job)}, job {job['id']}")
    else:
        print(f"{job['id']} {job['status']}")


def made_by(job: dict[str, Any]) -> str:
    """The version that a job made, in words; of content that was there before it made none."""
    name, digest = job["config"]["name"], job["artifacts"]["dataset"]["digest"]
    for version in versions(name):
        if version["artifact"]["digest"] == digest:
            return f"{name}@{version['version']} created: {counted(version['num_records'], 'record')}"
    return f"{name} has a version with this content already"
