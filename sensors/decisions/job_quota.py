"""Which submitted jobs wait for their organization's quota (rows J2, J11): those that do not fit beside what runs of it.

Within an organization jobs are started by priority and age, and nobody passes one that waits: a large job would wait for
ever, if small ones took each GPU that becomes free.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

import dagster as dg

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from resources.compute.local.capacity import gpu_names
from resources.jobs.command import asked_of
from resources.metadata.jobs import COMMAND, JobRecord
from resources.scheduling.quotas import PRIORITIES, Used, gpus_of, never_fits, reason_to_wait
from resources.settings.sections import Quota, Scheduler
from sensors.decisions.definition_lookup import recipe_of
from sensors.decisions.job_runs import NOT_GONE, PARTITION_TAG


def held_back(
    context: dg.SensorEvaluationContext, starting: Sequence[JobRecord], scheduler: Scheduler, active: Sequence[JobRecord]
) -> tuple[dict[str, str], dict[str, str]]:
    """Which of the jobs that could start wait for their organization's quota, and which never fit it, each with why.

    Args:
        starting: queued jobs, oldest first.
        active: all jobs that run or are queued.
    """
    quotas = scheduler.quotas
    limited = [job for job in active if job.organization in quotas]
    if not limited:
        return {}, {}
    # Where the machine has GPUs, a job that asks for none gets one all the same (`resources.compute.local.capacity`).
    least = 1 if gpu_names(scheduler) else 0
    recipe_named = cache(Recipe.named)  # a file is read and checked in milliseconds, and thousands of jobs may be queued
    wanted = {job.id: max(gpus_wanted(context, job, recipe_named), least) for job in limited}
    working = at_work(context.instance)
    never = {
        job.id: f"it {problem}"
        for job in starting
        if job.id in wanted and job.id not in working
        if (problem := never_fits(quotas[job.organization], wanted[job.id]))
    }
    fitting = [job for job in starting if job.id not in never]
    return waiting_for_quota(fitting, limited, working, quotas, wanted), never


def gpus_wanted(context: dg.SensorEvaluationContext, job: JobRecord, recipe_named: Callable[[str], Recipe]) -> int:
    """On all nodes. None of a job whose recipe is not there: it fails as it is started, and says why."""
    if job.type == COMMAND:
        asked = asked_of(job)
        return gpus_of(asked.resources, asked.distributed)
    try:
        named = job.config.get("recipe") or recipe_of(context, str(job.config["model"])) or ""
        recipe = recipe_named(str(named)).changed(job.config.get("parameters") or {})
        shape = recipe.on(job.resumed.gpus) if job.resumed.gpus else recipe
    except BadConfiguration:
        return 0
    return gpus_of(shape.hardware, shape.distributed)


def at_work(instance: dg.DagsterInstance) -> Collection[str]:
    """The jobs that a run works for, or will: between its start and its first word, a job is still queued."""
    runs = instance.get_runs(dg.RunsFilter(statuses=NOT_GONE))
    return {run.tags[PARTITION_TAG] for run in runs if PARTITION_TAG in run.tags}


def waiting_for_quota(
    starting: Sequence[JobRecord],
    active: Sequence[JobRecord],
    working: Collection[str],
    quotas: Mapping[str, Quota],
    wanted: Mapping[str, int],
) -> dict[str, str]:
    """Why each of the jobs waits that could start otherwise; those that may are not named. A pure function.

    Args:
        starting: queued jobs, oldest first.
        active: all jobs that run or are queued.
        working: the ids of those that a run works for.
        wanted: GPUs of each job of an organization with a quota.
    """
    used: dict[str, Used] = {}
    for job in active:
        if job.organization in quotas and (job.status == "running" or job.id in working):
            used[job.organization] = used.get(job.organization, Used()).and_one_of(wanted[job.id])
    waits: dict[str, str] = {}
    held_up: dict[str, str] = {}
    new = [job for job in starting if job.organization in quotas and job.id not in working]
    for job in sorted(new, key=lambda job: -PRIORITIES.index(job.schedule.priority)):
        taken = used.get(job.organization, Used())
        if ahead := held_up.get(job.organization):
            waits[job.id] = f"waits for its organization's quota, behind job {ahead}"
        elif reason := reason_to_wait(quotas[job.organization], taken, wanted[job.id]):
            waits[job.id] = reason
            held_up[job.organization] = job.id
        else:
            used[job.organization] = taken.and_one_of(wanted[job.id])
    return waits
