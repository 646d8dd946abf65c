"""The Kubernetes objects of a job with a command that nobody submits."""

import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hanzo_ml_assets.command import build_command_job, find_dataset_version
from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.dry_run.training import PLACEHOLDER_JOB_ID, format_header, open_read_only
from recipes.contracts.command_job import CommandJob
from recipes.contracts.job import BadConfiguration
from recipes.contracts.validation_errors import explain_first_error
from resources.compute.kubernetes.job_manifest import out_of_reach, render, to_yaml
from resources.jobs.command import stored_config
from resources.metadata.datasets import Datasets
from resources.metadata.jobs import COMMAND, JobRecord
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION


def dry_run(document: Mapping[str, Any]) -> str:
    """What would be applied, as YAML below a header of comments.

    Raises:
        BadConfiguration: the job could not be submitted; the message says what to do.
    """
    try:
        asked = CommandJob.model_validate(document)
    except ValidationError as error:
        raise BadConfiguration(f"job: {explain_first_error(error, CommandJob)}") from None
    job = JobRecord(
        id=PLACEHOLDER_JOB_ID,
        name=asked.name,
        type=COMMAND,
        status="queued",
        config=stored_config(asked, PLACEHOLDER_JOB_ID),
        user_id="",
        organization=DEFAULT_ORGANIZATION,
        submitted_at=0,
        started_at=None,
        ended_at=None,
        reason="",
        artifacts={},
        evaluation=None,
    )
    control_plane = ControlPlane()
    database = open_read_only(control_plane.settings)
    try:
        work = build_command_job(job, find_dataset_version(job, Datasets(database) if database else None), control_plane)
    finally:
        if database:
            database.close()
    scheduler = control_plane.settings.scheduler
    objects = render(work, scheduler)
    missing = asked.storage.dataset if "dataset" not in work.inputs else None
    unreachable = [f"dataset {missing}, which is not there (see `hanzo-ml dataset list`)"] if missing else []
    header = format_header(
        f"$ {shlex.join(asked.command)}", scheduler.backend, [*out_of_reach(work, scheduler), *unreachable]
    )
    return header + to_yaml(objects)
