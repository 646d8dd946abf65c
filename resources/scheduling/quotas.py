"""Quotas of concurrently running jobs and GPUs per organization, as pure functions.

A job that exceeds its organization's quota together with other jobs waits in the queue. One that exceeds it alone is
rejected at submission, or fails as soon as its requirements are known.
"""

from dataclasses import dataclass

from recipes.contracts.job import Distributed, Hardware, Schedule
from recipes.contracts.quantities import pluralize
from resources.errors import invalid
from resources.settings.scheduler import Quota

PRIORITIES = ("low", "medium", "high")
"""Lowest first."""


@dataclass(frozen=True)
class Usage:
    """Usage of an organization's running and starting jobs."""

    gpus: int = 0
    jobs: int = 0

    def plus_job(self, gpus: int) -> "Usage":
        return Usage(self.gpus + gpus, self.jobs + 1)


def count_gpus(hardware: Hardware, distributed: Distributed | None) -> int:
    """Return the GPUs of a job on all nodes; with gloo, `gpus_per_node` counts processes."""
    if distributed is None:
        return hardware.gpus
    on_a_node = distributed.gpus_per_node if distributed.backend == "nccl" else hardware.gpus
    return on_a_node * distributed.num_nodes


def impossible_reason(quota: Quota | None, gpus: int) -> str:
    """Return why a job would wait forever; empty if it fits once others have ended."""
    if quota is None or quota.max_gpus is None or gpus <= quota.max_gpus:
        return ""
    return (
        f"asks for {pluralize(gpus, 'GPU')}, and the quota of your organization is {quota.max_gpus}: ask for fewer, or have "
        "the operator raise max_gpus in scheduler.quotas"
    )


def refuse_impossible_job(quota: Quota | None, gpus: int) -> None:
    """Raise HanzoError if a job alone exceeds its organization's quota."""
    if problem := impossible_reason(quota, gpus):
        raise invalid(f"the job {problem}")


def refuse_oversized_sweep(quota: Quota | None, concurrent_trials: int, gpus: int) -> None:
    """Raise HanzoError if the concurrent trials of a sweep exceed the quota.

    The message states how many trials can run concurrently.
    """
    if quota is None:
        return
    places = quota.max_concurrent_jobs
    if places is not None and concurrent_trials > places:
        raise invalid(
            f"max_concurrent_trials is {concurrent_trials}, and the quota of your organization is "
            f"{pluralize(places, 'job')} at "
            f"once: lower it to {places}"
        )
    if quota.max_gpus is not None and concurrent_trials * gpus > quota.max_gpus:
        raise invalid(
            f"{pluralize(concurrent_trials, 'trial')} at once with {pluralize(gpus, 'GPU')} each are "
            f"{concurrent_trials * gpus}, and "
            f"the quota of your organization is {quota.max_gpus}: lower max_concurrent_trials to {quota.max_gpus // gpus}, "
            "or resources_per_trial.gpus"
        )


def waiting_reason(quota: Quota, used: Usage, gpus: int) -> str:
    """Return why a job must wait for others of its organization; empty if none."""
    if quota.max_concurrent_jobs is not None and used.jobs >= quota.max_concurrent_jobs:
        return f"waits for its organization's quota: {used.jobs} of {pluralize(quota.max_concurrent_jobs, 'job')} run"
    if quota.max_gpus is not None and used.gpus + gpus > quota.max_gpus:
        gpu_usage = f"{used.gpus} of {pluralize(quota.max_gpus, 'GPU')} are taken"
        return f"waits for its organization's quota: {gpu_usage}, and it asks for {gpus}"
    return ""


def apply_quota(schedule: Schedule, quota: Quota | None) -> Schedule:
    """Return a job's schedule limited by the quota of its organization.

    The job may lower the priority, but not raise it. It is preemptible if the schedule or the quota says so.
    """
    if quota is None:
        return schedule
    given = schedule.priority if quota.priority is None or "priority" in schedule.model_fields_set else quota.priority
    max_priority = quota.priority or PRIORITIES[-1]
    return schedule.model_copy(
        update={
            "priority": min(given, max_priority, key=PRIORITIES.index),
            "preemptible": schedule.preemptible or quota.preemptible,
        }
    )
