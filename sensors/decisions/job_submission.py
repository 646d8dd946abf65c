"""Submit queued jobs to a backend with its own queue, and decide which are admitted.

A job waiting there needs no run worker: its Dagster run starts at admission and attaches.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from enum import Enum, auto

import dagster as dg

from hanzo_ml_assets.command import build_command_job, find_dataset_version
from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.failure_reason import describe_exception
from hanzo_ml_assets.training_plan import make_training_plan, training_job
from recipes.contracts.job import BadConfiguration, Job
from recipes.contracts.quantities import pluralize
from resources.compute.base import Observation, Phase
from resources.errors import HanzoError
from resources.jobs.resume import settle_rewind
from resources.metadata.jobs import COMMAND, JobRecord
from resources.settings.scheduler import Scheduler
from sensors.decisions.definition_lookup import find_model

SUBMISSION_SECONDS = 20
"""Part of a sensor tick reserved for submitting jobs."""


class Step(Enum):
    """What happens next to a queued job that may start."""

    SUBMIT = auto()
    WAIT = auto()
    RUN = auto()


def next_step(observed: Observation | None) -> Step:
    """Decide by the backend's state of a job; None if it was not submitted.

    A job that already ended still gets its run, which reports the end.
    """
    if observed is None:
        return Step.SUBMIT
    return Step.WAIT if observed.phase is Phase.PENDING else Step.RUN


def describe_full(observed: Collection[Observation | None], scheduler: Scheduler) -> str:
    """Return why no further job is submitted, or ""; queued jobs don't count."""
    phases = [each.phase for each in observed if each is not None]
    admitted = sum(phase not in (Phase.PENDING, Phase.SUCCEEDED, Phase.FAILED) for phase in phases)
    if admitted < scheduler.max_concurrent_jobs:
        return ""
    return f"waits for its turn: {admitted} of {pluralize(scheduler.max_concurrent_jobs, 'job')} run"


def submit_jobs(context: dg.SensorEvaluationContext, jobs: Sequence[JobRecord], control_plane: ControlPlane) -> None:
    """Plan and submit jobs, oldest first, as many as a tick has time for.

    A failure of one job must not block the others; it is retried at the next tick.
    """
    deadline = time.monotonic() + SUBMISSION_SECONDS
    for job in jobs:
        if time.monotonic() > deadline:
            return
        try:
            control_plane.compute.submit(plan_job(context, job, control_plane))
        except BadConfiguration as problem:
            with suppress(HanzoError):  # ended concurrently; continue with the other jobs
                control_plane.jobs.fail(job.id, str(problem))
        except Exception as error:
            context.log.exception(f"cannot submit job {job.id}")
            control_plane.jobs.set_waiting_reason(job.id, f"cannot be submitted yet: {describe_exception(error)}")


def plan_job(context: dg.SensorEvaluationContext, job: JobRecord, control_plane: ControlPlane) -> Job:
    """Return the job document of a queued job.

    The job's asset builds an equal one, because planning records what it resolves.

    Raises:
        BadConfiguration: the job cannot run as it was submitted; the message says why.
    """
    if job.type == COMMAND:
        return build_command_job(job, find_dataset_version(job, control_plane.datasets), control_plane)
    settle_rewind(control_plane.database, job)
    plan = make_training_plan(find_model(context, str(job.config["model"])), job.id, control_plane)
    return training_job(plan, control_plane)
