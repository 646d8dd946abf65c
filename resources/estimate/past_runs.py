"""Measure the speed of comparable past runs, from the times of their logged losses."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from sqlalchemy import Connection, select

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import Architecture
from recipes.planning.throughput import estimate_flops_per_token
from resources.metadata.database import Database
from resources.metadata.field_rules import MetricPoint
from resources.metadata.jobs import TRAINING, JobRecord, Jobs
from resources.metadata.tables import jobs, params
from resources.metadata.tracking.metrics import Metrics
from resources.registration.model_facts import STEPS_METRIC, TOKENS_METRIC

LOSS_METRIC = "train/loss"
MAX_RUNS = 20
"""Maximum number of runs to read: older ones ran other code."""
MAX_POINTS = 2000
"""Number of a run's steps that suffice to measure its speed."""
MIN_STEPS = 5
PAUSE_FACTOR = 10.0
"""An interval of more than this many times the median is a pause: the run was killed, and resumed later."""


@dataclass(frozen=True)
class PastRun:
    """The measurements of a run.

    `speed` is operations per second if the base model's shape is known, else tokens per second. `overhead_seconds` is the
    job's time outside its steps; None until it has completed.
    """

    run_id: str
    tokens_per_second: float
    speed: float
    overhead_seconds: float | None


def work_per_token(recipe: Recipe, shape: Architecture | None) -> float:
    """Return the work per token, in the units of `PastRun.speed`."""
    try:
        return estimate_flops_per_token(recipe, shape) if shape else 1.0
    except BadConfiguration:  # an adapter on an unknown module
        return 1.0


def find_past_runs(database: Database, recipe: Recipe, shape: Architecture | None, organization: str) -> list[PastRun]:
    """Return a recipe's newest comparable runs, newest first.

    Runs that are too short to be measured are left out.
    """
    with database.read() as connection:
        found = []
        for job in recipe_jobs(connection, recipe.name, organization):
            then = job_recipe(job, recipe.name)
            if then is None or comparison_key(then) != comparison_key(recipe):
                continue
            history = Metrics(database).history(job.id, LOSS_METRIC, MAX_POINTS, connection=connection).points
            times = {point.step: point.timestamp for point in history}  # if a step was repeated, the last time counts
            seconds = seconds_per_step(times)
            each = tokens_per_step(then, Metrics(database).latest(job.id, connection=connection))
            if seconds is None or each is None:
                continue
            tokens = each / seconds
            around = job_overhead_seconds(job, times, then.max_steps, Jobs(database).last_started_at(job, connection))
            found.append(PastRun(job.id, tokens, tokens * work_per_token(then, shape), around))
        return found


def tokens_per_step(recipe: Recipe, latest: Sequence[MetricPoint]) -> float | None:
    """Return the tokens per step of a run with these newest metrics.

    Pairs have different lengths, so their number is known only after the run has logged what it used.
    """
    if not recipe.has_pairs:
        return recipe.tokens_per_step
    used = {point.key: point.value for point in latest}
    return used[TOKENS_METRIC] / used[STEPS_METRIC] if used.get(STEPS_METRIC) and used.get(TOKENS_METRIC) else None


def recipe_jobs(connection: Connection, recipe: str, organization: str) -> list[JobRecord]:
    """Return the newest jobs whose runs logged this recipe name."""
    query = (
        select(jobs)
        .join(params, params.c.run_id == jobs.c.id)
        .where(params.c.key == "recipe", params.c.value == recipe, jobs.c.organization == organization)
        .where(jobs.c.type == TRAINING)
        .order_by(jobs.c.submitted_at.desc())
        .limit(MAX_RUNS)
    )
    return [JobRecord(**row) for row in connection.execute(query).mappings()]


def newest_model_job(connection: Connection, model: str, organization: str) -> JobRecord | None:
    """Return the newest started job of a model definition.

    Its run names the definition's recipe and dataset.
    """
    query = (
        select(jobs)
        .where(jobs.c.organization == organization, jobs.c.started_at.is_not(None))
        .order_by(jobs.c.submitted_at.desc())
        .limit(10 * MAX_RUNS)
    )
    found = (JobRecord(**row) for row in connection.execute(query).mappings())
    return next((job for job in found if job.config.get("model") == model), None)


def newest_run_params(database: Database, model: str, organization: str) -> dict[str, str]:
    """Return the params that the run of `newest_model_job` logged; empty if none was started."""
    with database.read() as connection:
        job = newest_model_job(connection, model, organization)
        return read_params(connection, job.id) if job else {}


def read_params(connection: Connection, run_id: str) -> dict[str, str]:
    rows = connection.execute(select(params.c.key, params.c.value).where(params.c.run_id == run_id))
    return {row.key: row.value for row in rows}


def job_recipe(job: JobRecord, name: str) -> Recipe | None:
    """Return the recipe with the job's changes.

    None if it no longer exists or does not fit the current schema.
    """
    try:
        return Recipe.named(name).changed(job.config.get("parameters") or {})
    except BadConfiguration:
        return None


def comparison_key(recipe: Recipe) -> tuple[object, ...]:
    """Return what two runs must have in common for one's speed to predict the other's."""
    return (
        recipe.base_model,
        recipe.method,
        recipe.objective,
        recipe.gradient_checkpointing,
        recipe.hardware.gpus,
        recipe.hardware.gpu_type,
        recipe.hardware.cpu,
        recipe.distributed,
    )


def seconds_per_step(times: dict[int, int]) -> float | None:
    """Return the mean seconds of a step, including evaluations and checkpoints.

    `times` has the time (ms since 1970) at which each step ended. None if there are too few.
    """
    steps = sorted(times)
    each = [
        (times[after] - times[before]) / 1000 / (after - before)
        for before, after in pairwise(steps)
        if times[after] > times[before]
    ]
    if len(each) < MIN_STEPS:
        return None
    usual = median(each)
    steady = [seconds for seconds in each if seconds <= PAUSE_FACTOR * usual]
    return sum(steady) / len(steady)


def job_overhead_seconds(job: JobRecord, times: dict[int, int], steps: int, last_started_at: int) -> float | None:
    """Return a completed job's seconds before the first and after the last step.

    Returns None if the job did not complete all steps.

    Args:
        last_started_at: when the job was last started. If it was interrupted before its first step, only this start counts:
            `started_at` is the first start, and the job was idle between the two.
    """
    if job.status != "completed" or job.started_at is None or job.ended_at is None or max(times) != steps:
        return None
    first = min(times.values())
    started = last_started_at if last_started_at <= first else job.started_at
    return max(0.0, (job.ended_at - started - (max(times.values()) - first)) / 1000)
