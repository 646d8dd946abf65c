"""How fast runs of the same kind were, by the times of the losses that they logged."""

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
"""Runs that are looked at: older ones ran other code."""
MAX_POINTS = 2000
"""Steps of a run that are enough to know its speed."""
MIN_STEPS = 5
PAUSE_FACTOR = 10.0
"""An interval that many times the median is no step: the run was killed, and went on later."""


@dataclass(frozen=True)
class PastRun:
    """What a run measured. `speed` is operations a second where the base model's shape is known, else tokens a second.

    `overhead_seconds` is what the job took beside its steps; none while it has not ended well.
    """

    run_id: str
    tokens_per_second: float
    speed: float
    overhead_seconds: float | None


def work_per_token(recipe: Recipe, shape: Architecture | None) -> float:
    """What `PastRun.speed` counts for a token."""
    try:
        return estimate_flops_per_token(recipe, shape) if shape else 1.0
    except BadConfiguration:  # an adapter on a module that is not known here
        return 1.0


def find_past_runs(database: Database, recipe: Recipe, shape: Architecture | None, organization: str) -> list[PastRun]:
    """The newest runs of a recipe that were comparable and long enough to be measured, newest first."""
    with database.read() as connection:
        found = []
        for job in recipe_jobs(connection, recipe.name, organization):
            then = job_recipe(job, recipe.name)
            if then is None or comparison_key(then) != comparison_key(recipe):
                continue
            history = Metrics(database).history(job.id, LOSS_METRIC, MAX_POINTS, connection=connection).points
            times = {point.step: point.timestamp for point in history}  # of a step that was repeated, the last
            seconds = seconds_per_step(times)
            each = tokens_per_step(then, Metrics(database).latest(job.id, connection=connection))
            if seconds is None or each is None:
                continue
            tokens = each / seconds
            around = job_overhead_seconds(job, times, then.max_steps, Jobs(database).last_started_at(job, connection))
            found.append(PastRun(job.id, tokens, tokens * work_per_token(then, shape), around))
        return found


def tokens_per_step(recipe: Recipe, latest: Sequence[MetricPoint]) -> float | None:
    """Of a run with those newest metrics. Pairs are as long as they are: it is known once the run has said what it used."""
    if not recipe.has_pairs:
        return recipe.tokens_per_step
    used = {point.key: point.value for point in latest}
    return used[TOKENS_METRIC] / used[STEPS_METRIC] if used.get(STEPS_METRIC) and used.get(TOKENS_METRIC) else None


def recipe_jobs(connection: Connection, recipe: str, organization: str) -> list[JobRecord]:
    """The newest jobs whose runs say that they used the recipe of that name."""
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
    """The newest job of a model definition that was started, which says which recipe and dataset that has."""
    query = (
        select(jobs)
        .where(jobs.c.organization == organization, jobs.c.started_at.is_not(None))
        .order_by(jobs.c.submitted_at.desc())
        .limit(10 * MAX_RUNS)
    )
    found = (JobRecord(**row) for row in connection.execute(query).mappings())
    return next((job for job in found if job.config.get("model") == model), None)


def newest_run_params(database: Database, model: str, organization: str) -> dict[str, str]:
    """The parameters that the run of `newest_model_job` logged; nothing where none was started."""
    with database.read() as connection:
        job = newest_model_job(connection, model, organization)
        return read_params(connection, job.id) if job else {}


def read_params(connection: Connection, run_id: str) -> dict[str, str]:
    rows = connection.execute(select(params.c.key, params.c.value).where(params.c.run_id == run_id))
    return {row.key: row.value for row in rows}


def job_recipe(job: JobRecord, name: str) -> Recipe | None:
    """The recipe as the job changed it; none where it is no longer there or does not fit today's schema."""
    try:
        return Recipe.named(name).changed(job.config.get("parameters") or {})
    except BadConfiguration:
        return None


def comparison_key(recipe: Recipe) -> tuple[object, ...]:
    """What two runs must share so that the speed of one says something about the other."""
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
    """Mean seconds of a step, evaluations and checkpoints included, from the milliseconds at which steps ended."""
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
    """Seconds before the first step and after the last one of a job that ran through.

    Args:
        begun_at: when it was started last. Of one that had broken off before its first step nothing counts but that start:
            `started_at` is the time of the first, and between the two it stood still.
    """
    if job.status != "completed" or job.started_at is None or job.ended_at is None or max(times) != steps:
        return None
    first = min(times.values())
    started = last_started_at if last_started_at <= first else job.started_at
    return max(0.0, (job.ended_at - started - (max(times.values()) - first)) / 1000)
