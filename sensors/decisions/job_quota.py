"""Decide which submitted jobs wait for their organization's quota."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

import dagster as dg

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from resources.compute.local.capacity import gpu_names
from resources.jobs.command import read_command
from resources.metadata.jobs import COMMAND, JobRecord
from resources.scheduling.quotas import PRIORITIES, Usage, count_gpus, impossible_reason, waiting_reason
from resources.settings.scheduler import Quota, Scheduler
from sensors.decisions.definition_lookup import find_model_recipe
from sensors.decisions.job_runs import PARTITION_TAG, UNFINISHED


def apply_quotas(
    context: dg.SensorEvaluationContext,
    starting: Sequence[JobRecord],
    scheduler: Scheduler,
    active: Sequence[JobRecord],
    submitted: Collection[str] | None = None,
) -> tuple[dict[str, str], dict[str, str]]:
    """Return why jobs wait for their quota, and why others exceed it.

    Args:
        starting: queued jobs, oldest first.
        active: all jobs that run or are queued.
        submitted: ids of jobs in the backend's queue, which counts their GPUs; None for a backend without a queue.
    """
    quotas = scheduler.quotas
    limited = [job for job in active if job.organization in quotas]
    if not limited:
        return {}, {}
    # On a machine with GPUs, a job that requests none still gets one (`resources.compute.local.capacity`).
    least = 1 if gpu_names(scheduler) else 0
    recipe_named = cache(Recipe.named)  # loading a recipe takes milliseconds, and thousands of jobs may be queued
    wanted = {job.id: max(count_requested_gpus(context, job, recipe_named), least) for job in limited}
    working = {*jobs_with_runs(context.instance), *(submitted or ())}
    never = {
        job.id: f"it {problem}"
        for job in starting
        if job.id in wanted and job.id not in working
        if (problem := impossible_reason(quotas[job.organization], wanted[job.id]))
    }
    fitting = [job for job in starting if job.id not in never]
    limits = quotas if submitted is None else job_count_quotas(quotas)
    return explain_quota_waits(fitting, limited, working, limits, wanted), never


def job_count_quotas(quotas: Mapping[str, Quota]) -> dict[str, Quota]:
    """Return the quotas without their GPU limits."""
    return {organization: quota.model_copy(update={"max_gpus": None}) for organization, quota in quotas.items()}


def count_requested_gpus(context: dg.SensorEvaluationContext, job: JobRecord, recipe_named: Callable[[str], Recipe]) -> int:
    """Return the GPUs of all nodes; 0 if the recipe is missing, which fails later."""
    if job.type == COMMAND:
        asked = read_command(job)
        return count_gpus(asked.resources, asked.distributed)
    try:
        named = job.config.get("recipe") or find_model_recipe(context, str(job.config["model"])) or ""
        recipe = recipe_named(str(named)).changed(job.config.get("parameters") or {})
        shape = recipe.for_processes(job.resumed.gpus) if job.resumed.gpus else recipe
    except BadConfiguration:
        return 0
    return count_gpus(shape.hardware, shape.distributed)


def jobs_with_runs(instance: dg.DagsterInstance) -> Collection[str]:
    """Return ids of jobs with an unfinished run; until it reports, the job stays queued."""
    runs = instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))
    return {run.tags[PARTITION_TAG] for run in runs if PARTITION_TAG in run.tags}


def explain_quota_waits(
    starting: Sequence[JobRecord],
    active: Sequence[JobRecord],
    working: Collection[str],
    quotas: Mapping[str, Quota],
    wanted: Mapping[str, int],
) -> dict[str, str]:
    """Return why jobs wait for a quota, by job id; pure.

    Args:
        starting: queued jobs, oldest first.
        active: all jobs that run or are queued.
        working: ids of the jobs that have a run.
        wanted: GPUs of each job of an organization with a quota.
    """
    used: dict[str, Usage] = {}
    for job in active:
        if job.organization in quotas and (job.status == "running" or job.id in working):
            used[job.organization] = used.get(job.organization, Usage()).plus_job(wanted[job.id])
    waits: dict[str, str] = {}
    held_up: dict[str, str] = {}
    new = [job for job in starting if job.organization in quotas and job.id not in working]
    for job in sorted(new, key=lambda job: -PRIORITIES.index(job.schedule.priority)):
        taken = used.get(job.organization, Usage())
        if ahead := held_up.get(job.organization):
            waits[job.id] = f"waits for its organization's quota, behind job {ahead}"
        elif reason := waiting_reason(quotas[job.organization], taken, wanted[job.id]):
            waits[job.id] = reason
            held_up[job.organization] = job.id
        else:
            used[job.organization] = taken.plus_job(wanted[job.id])
    return waits
