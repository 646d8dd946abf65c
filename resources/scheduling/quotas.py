"""What an organization's jobs may take at a time: GPUs and places (rows J2, J11, W3, Z28). Pure functions.

A job that does not fit beside the others of its organization waits in the queue. One that never fits is refused as it is
submitted, or fails as soon as it is known what it wants.
"""

from dataclasses import dataclass

from recipes.contracts.job import Distributed, Hardware, Schedule
from recipes.counted import counted
from resources.errors import invalid
from resources.settings.sections import Quota

PRIORITIES = ("low", "medium", "high")
"""Lowest first."""


@dataclass(frozen=True)
class Used:
    """What the jobs of an organization take that run, or are about to."""

    gpus: int = 0
    jobs: int = 0

    def and_one_of(self, gpus: int) -> "Used":
        return Used(self.gpus + gpus, self.jobs + 1)


def gpus_of(hardware: Hardware, distributed: Distributed | None) -> int:
    """How many GPUs a job takes, on all nodes. Over gloo, `gpus_per_node` counts processes."""
    if distributed is None:
        return hardware.gpus
    on_a_node = distributed.gpus_per_node if distributed.backend == "nccl" else hardware.gpus
    return on_a_node * distributed.num_nodes


def never_fits(quota: Quota | None, gpus: int) -> str:
    """Why a job could wait for ever; nothing where it fits when others have ended."""
    if quota is None or quota.max_gpus is None or gpus <= quota.max_gpus:
        return ""
    return (
        f"asks for {counted(gpus, 'GPU')}, and the quota of your organization is {quota.max_gpus}: ask for fewer, or have "
        "the operator raise max_gpus in scheduler.quotas"
    )


def refuse_what_never_fits(quota: Quota | None, gpus: int) -> None:
    """Raises HanzoError of a job that its organization's quota has no room for, whatever else runs."""
    if problem := never_fits(quota, gpus):
        raise invalid(f"the job {problem}")


def refuse_sweep_beyond(quota: Quota | None, trials_at_once: int, gpus: int) -> None:
    """Of a sweep whose trials could never all run at once as it asks. Raises HanzoError with the number that can."""
    if quota is None:
        return
    places = quota.max_concurrent_jobs
    if places is not None and trials_at_once > places:
        raise invalid(
            f"max_concurrent_trials is {trials_at_once}, and the quota of your organization is {counted(places, 'job')} at "
            f"once: lower it to {places}"
        )
    if quota.max_gpus is not None and trials_at_once * gpus > quota.max_gpus:
        raise invalid(
            f"{counted(trials_at_once, 'trial')} at once with {counted(gpus, 'GPU')} each are {trials_at_once * gpus}, and "
            f"the quota of your organization is {quota.max_gpus}: lower max_concurrent_trials to {quota.max_gpus // gpus}, "
            "or resources_per_trial.gpus"
        )


def reason_to_wait(quota: Quota, used: Used, gpus: int) -> str:
    """Why a job does not start beside those that its organization has already; nothing where it may."""
    if quota.max_concurrent_jobs is not None and used.jobs >= quota.max_concurrent_jobs:
        return f"waits for its organization's quota: {used.jobs} of {counted(quota.max_concurrent_jobs, 'job')} run"
    if quota.max_gpus is not None and used.gpus + gpus > quota.max_gpus:
        taken = f"{used.gpus} of {counted(quota.max_gpus, 'GPU')} are taken"
        return f"waits for its organization's quota: {taken}, and it asks for {gpus}"
    return ""


def under_quota(schedule: Schedule, quota: Quota | None) -> Schedule:
    """A job's schedule in its organization: what it says of its priority may lower it and not raise it, and its nodes may be
    taken away where either says so.
    """
    if quota is None:
        return schedule
    given = schedule.priority if quota.priority is None or "priority" in schedule.model_fields_set else quota.priority
    most = quota.priority or PRIORITIES[-1]
    return schedule.model_copy(
        update={
            "priority": min(given, most, key=PRIORITIES.index),
            "preemptible": schedule.preemptible or quota.preemptible,
        }
    )
