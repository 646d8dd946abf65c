"""Totals over all organizations for Prometheus, and GPU hours by experiment."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Double, case, cast, distinct, func, select

from recipes.contracts.job import normalize_priority
from recipes.storage import uris
from resources.metadata.jobs import COMMAND
from resources.metadata.tables import (
    artifacts,
    dataset_versions,
    events,
    gpu_usage,
    jobs,
    registered_models,
    runs,
)

# Totals over all organizations for Prometheus, each from one grouped query.
#
# Counters are computed from facts that never change back (a job that reached a state always will have), so that a counter
# continues from its value after a restart.

Labels = tuple[str, ...]
SUBMITTED_TYPE = case(
    (jobs.c.type == COMMAND, func.coalesce(jobs.c.config["type"].as_string(), jobs.c.type)), else_=jobs.c.type
)
TYPED_JOBS = select(
    jobs.c.id, SUBMITTED_TYPE.label("type"), jobs.c.status, jobs.c.organization, jobs.c.started_at, jobs.c.ended_at
).subquery()
"""Jobs by the type that was submitted and that the API returns, also for commands, which the specification does not have."""
REACHED_STATES = {
    "job.submitted": "queued",
    "job.started": "running",
    "job.completed": "completed",
    "job.failed": "failed",
    "job.cancelled": "cancelled",
}
DURATION_BUCKETS = (10, 60, 300, 900, 1800, 3600, 7200, 14_400, 28_800, 43_200, 86_400, 172_800, 259_200)
GPU_HOURS_METRIC = "system/total_gpu_hours"
GPU_HOURS = cast(func.sum(gpu_usage.c.gpus * (gpu_usage.c.metered_until - gpu_usage.c.started_at)), Double) / 3_600_000.0
"""Metered by the control plane. The runs' own metric is not used, because any user can write it."""
GPU_TYPE_TAG = "system/gpu_type"
DEFAULT_PRIORITY = "medium"


@dataclass(frozen=True)
class Durations:
    """A histogram.

    How many jobs ended within each of `DURATION_BUCKETS`, how many in all, and their sum in seconds.
    """

    within: Sequence[int]
    count: int
    seconds: float


@dataclass(frozen=True)
class Totals:
    """Values by label values, in the order of the specification's label names."""

    jobs: Mapping[Labels, float]
    gpu_hours: Mapping[Labels, float]
    datasets: Mapping[Labels, float]
    models: Mapping[Labels, float]
    durations: Mapping[str, Durations]
    running: Mapping[Labels, float]
    gpus_allocated: Mapping[Labels, float]
    queued: Mapping[Labels, float]
    stored_bytes: Mapping[str, float]


def read_totals(connection: Connection) -> Totals:
    return Totals(
        jobs=count_jobs_by_state(connection),
        gpu_hours=sum_gpu_hours(connection),
        datasets=read_grouped(
            connection, select(dataset_versions.c.organization, func.count()).group_by(dataset_versions.c.organization)
        ),
        models=read_grouped(
            connection,
            # The highest number assigned: versions that were deleted later were registered too.
            select(registered_models.c.organization, func.sum(registered_models.c.last_version)).group_by(
                registered_models.c.organization
            ),
        ),
        durations=read_durations(connection),
        running=read_grouped(
            connection,
            select(TYPED_JOBS.c.type, TYPED_JOBS.c.organization, func.count())
            .where(TYPED_JOBS.c.status == "running")
            .group_by(TYPED_JOBS.c.type, TYPED_JOBS.c.organization),
        ),
        gpus_allocated=count_allocated_gpus(connection),
        queued=count_queued_jobs(connection),
        stored_bytes=sum_stored_bytes(connection),
    )


def read_grouped(connection: Connection, query: object) -> dict[Labels, float]:
    """Read rows of labels and a number."""
    rows = connection.execute(query).all()  # type: ignore[call-overload]
    return {tuple(str(label) for label in row[:-1]): float(row[-1] or 0) for row in rows}


def count_jobs_by_state(connection: Connection) -> dict[Labels, float]:
    query = (
        select(TYPED_JOBS.c.type, events.c.type, TYPED_JOBS.c.organization, func.count(distinct(events.c.key)))
        .select_from(events)
        .join(TYPED_JOBS, TYPED_JOBS.c.id == events.c.key)
        .where(events.c.type.in_(REACHED_STATES))
        .group_by(TYPED_JOBS.c.type, events.c.type, TYPED_JOBS.c.organization)
    )
    return {
        (kind, REACHED_STATES[event], org): count for (kind, event, org), count in read_grouped(connection, query).items()
    }


def sum_gpu_hours(connection: Connection) -> dict[Labels, float]:
    query = (
        select(gpu_usage.c.gpu_type, jobs.c.organization, GPU_HOURS)
        .join_from(gpu_usage, jobs, jobs.c.id == gpu_usage.c.owner_id)
        .group_by(gpu_usage.c.gpu_type, jobs.c.organization)
    )
    return read_grouped(connection, query)


def read_durations(connection: Connection) -> dict[str, Durations]:
    seconds = (TYPED_JOBS.c.ended_at - TYPED_JOBS.c.started_at) / 1000.0
    within = [func.sum(case((seconds <= bucket, 1), else_=0)) for bucket in DURATION_BUCKETS]
    query = (
        select(TYPED_JOBS.c.type, func.count(), func.sum(seconds), *within)
        .where(TYPED_JOBS.c.started_at.is_not(None), TYPED_JOBS.c.ended_at.is_not(None))
        .group_by(TYPED_JOBS.c.type)
    )
    return {
        row[0]: Durations([int(count) for count in row[3:]], int(row[1]), float(row[2])) for row in connection.execute(query)
    }


def count_allocated_gpus(connection: Connection) -> dict[Labels, float]:
    """Return the number of GPUs that running attempts use."""
    held = select(gpu_usage.c.gpu_type, func.sum(gpu_usage.c.gpus)).where(gpu_usage.c.is_open)
    return read_grouped(connection, held.group_by(gpu_usage.c.gpu_type))


def count_queued_jobs(connection: Connection) -> dict[Labels, float]:
    priorities = jobs.c.config["schedule"]["priority"].as_string(), jobs.c.config["priority"].as_string()
    priority = func.coalesce(*priorities).label("priority")
    inner = select(jobs.c.organization, priority).where(jobs.c.status == "queued").subquery()
    query = select(inner.c.organization, func.coalesce(inner.c.priority, DEFAULT_PRIORITY), func.count()).group_by(
        inner.c.organization, inner.c.priority
    )
    queued: dict[Labels, float] = {}
    for (organization, written), count in read_grouped(connection, query).items():
        labels = organization, str(normalize_priority(written))
        queued[labels] = queued.get(labels, 0) + count
    return queued


def sum_stored_bytes(connection: Connection) -> dict[str, float]:
    """Return the size of the recorded artifacts by kind.

    The kind is the beginning of the URI: `s3://BUCKET/KIND`, or a bucket of its own.
    """
    place = case(
        (artifacts.c.uri.startswith(f"{uris.DATASETS}/"), "datasets"),
        (artifacts.c.uri.startswith(f"{uris.CHECKPOINTS}/"), "checkpoints"),
        (artifacts.c.uri.startswith(f"{uris.RUNS}/"), "checkpoints"),
        (artifacts.c.uri.startswith(f"{uris.MODELS}/"), "models"),
        else_="other",
    ).label("place")
    inner = select(place, artifacts.c.size_bytes).subquery()
    query = select(inner.c.place, func.sum(inner.c.size_bytes)).group_by(inner.c.place)
    return {place: total for (place,), total in read_grouped(connection, query).items() if place != "other"}


# GPU hours of runs and experiments.


def sum_gpu_hours_by_experiment(reader: Connection, experiment_ids: Collection[int]) -> Mapping[int, float]:
    """Sum the GPU hours of all runs of each experiment, including deleted ones.

    0 if no run used a GPU.
    """
    query = (
        select(runs.c.experiment_id, GPU_HOURS)
        .join_from(runs, gpu_usage, gpu_usage.c.owner_id == runs.c.id)
        .where(runs.c.experiment_id.in_(experiment_ids))
        .group_by(runs.c.experiment_id)
    )
    return dict.fromkeys(experiment_ids, 0.0) | dict(reader.execute(query).tuples().all())


def sum_run_gpu_hours(reader: Connection, run_id: str) -> float | None:
    """Return a run's GPU hours.

    None if it belongs to no job, or used no GPU.
    """
    hours = reader.execute(select(GPU_HOURS).where(gpu_usage.c.owner_id == run_id)).scalar()
    return None if hours is None else float(hours)
