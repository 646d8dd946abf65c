"""How many jobs this machine runs at the same time, and on which GPUs."""

from recipes.contracts.job import Job, Program
from resources.compute.local.gpus import installed
from resources.settings.sections import Scheduler

GPU_POOL = "gpu"
"""Dagster's pool of all assets that train or evaluate: at most `max_running_jobs` of them are followed at the same time."""
GPU_PROGRAMS = frozenset({Program.TRAIN, Program.EVALUATE, Program.COMMAND})
"""Programs that need a slot, and GPUs where the machine has any."""


def gpu_names(scheduler: Scheduler) -> tuple[str, ...] | None:
    """GPUs that jobs may use: those in the settings, else all of this machine; None where no GPU is known."""
    return tuple(map(str, range(len(installed())))) or None if scheduler.devices is None else scheduler.devices


def max_running_jobs(scheduler: Scheduler) -> int:
    """How many jobs may train or evaluate on this machine at the same time."""
    return min(scheduler.jobs_at_once or len(gpu_names(scheduler) or "1"), scheduler.max_concurrent_jobs)


def gpus_for(job: Job, names: tuple[str, ...] | None) -> int:
    """How many GPUs a job gets: at least one where there are any, at most all."""
    if job.program not in GPU_PROGRAMS or not names:
        return 0
    requested = job.distributed.gpus_per_node if job.distributed else job.hardware.gpus
    return min(max(requested, 1), len(names))
