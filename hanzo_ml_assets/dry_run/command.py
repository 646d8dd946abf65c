"""The Kubernetes objects of a command job that is not submitted."""

import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hanzo_ml_assets.command import build_command_job, find_dataset_version
from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.dry_run.training import OWN_USER, format_header, open_read_only
from recipes.contracts.command_job import CommandJob
from recipes.contracts.job import BadConfiguration
from recipes.contracts.validation_errors import explain_first_error
from resources.compute.kubernetes.job_manifest import out_of_reach, render, to_yaml
from resources.jobs.command import stored_config
from resources.jobs.submission import check_command
from resources.metadata.datasets import Datasets
from resources.metadata.job_record import UNSUBMITTED, unsubmitted_job
from resources.metadata.jobs import COMMAND
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION


def dry_run(document: Mapping[str, Any]) -> str:
    """Return the objects to apply as YAML, below a header of comments.

    Raises:
        BadConfiguration, HanzoError: the job could not be submitted; the message says what to do.
    """
    try:
        asked = CommandJob.model_validate(document)
    except ValidationError as error:
        raise BadConfiguration(f"job: {explain_first_error(error, CommandJob)}") from None
    control_plane = ControlPlane()
    asked = check_command(asked, control_plane.settings, OWN_USER)
    job = unsubmitted_job(asked.name, COMMAND, stored_config(asked, UNSUBMITTED), "", DEFAULT_ORGANIZATION)
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
