"""Command jobs that run Python code on the cluster."""

from typing import Any
from uuid import uuid4

from recipes.contracts.command_job import CommandJob
from recipes.contracts.job import Job
from resources.jobs.command import plan_command, stored_config
from resources.metadata.jobs import COMMAND, Jobs
from tests.cluster.installation import Installation

GREET = "print('hello')"


def submit(installation: Installation, code: str, *, id: str | None = None, gpus: int = 1, **changed: Any) -> Job:
    """Submit a command that runs this Python code."""
    resources = {"gpus": gpus, "memory": "512Mi"}
    command = CommandJob.model_validate(
        {"name": "fault", "command": ["python", "-c", code], "resources": resources, **changed}
    )
    identifier = id or uuid4().hex
    record = Jobs(installation.database).submit(
        id=identifier,
        name="fault",
        type=COMMAND,
        config=stored_config(command, identifier),
        user="tester",
        organization="default",
        status="running",
    )
    job = plan_command(
        record, None, store=installation.settings.store, tracking_uri=installation.url, cache_dir="/work/cache"
    )
    installation.compute.submit(job)
    return job


def objects(installation: Installation, job: Job) -> list[str]:
    selector = f"ml.hanzo.ai/job={installation.jobs.get(job).name}"
    kinds = "jobsets,pods,configmaps,secrets"
    found = installation.cluster.get(kinds, f"--namespace={installation.name}", f"--selector={selector}")["items"]
    return [f"{item['kind']}/{item['metadata']['name']}" for item in found]
