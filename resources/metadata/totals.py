"""Numbers over all organizations, for Prometheus (rows V3-V5), each by one grouped query.

What only grows is counted from what is never taken back (a job that reached a state stays one that did), so that a counter
goes on where it was after a restart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, case, distinct, func, select

from recipes.storage import uris
from resources.metadata.jobs import COMMAND
from resources.metadata.tables import (
    artifacts,
    dataset_versions,
    events,
    jobs,
    latest_metrics,
    registered_models,
    run_tags,
    runs,
)

Labels = tuple[str, ...]
SUBMITTED_TYPE = case(
    (jobs.c.type == COMMAND, func.coalesce(jobs.c.config["type"].as_string(), jobs.c.type)), else_=jobs.c.type
)
TYPED = select(
    jobs.c.id, SUBMITTED_TYPE.label("type"), jobs.c.status, jobs.c.organization, jobs.c.started_at, jobs.c.ended_at
).subquery()
"""Jobs by the type that was submitted, as the API tells it: a command is none of the specification's (row G3)."""
REACHED = {
    "job.submitted": "queued",
    "job.started": "running",
    "job.completed": "completed",
    "job.failed": "failed",
    "job.cancelled": "cancelled",
}
DURATION_BUCKETS = (10, 60, 300, 900, 1800, 3600, 7200, 14_400, 28_800, 43_200, 86_400, 172_800, 259_200)
GPU_HOURS_METRIC = "system/total_gpu_hours"
CREDIBLE = 1e12
"""More is a metric of somebody's own; and a sum of such may be no double, which PostgreSQL refuses and JSON cannot say."""
MEASURED_HOURS = (
    (latest_metrics.c.key == GPU_HOURS_METRIC)
    & latest_metrics.c.is_nan.is_(False)
    & latest_metrics.c.value.between(0, CREDIBLE)
)
GPU_TYPE_TAG = "system/gpu_type"
DEFAULT_PRIORITY = "medium"


@dataclass(frozen=True)
class Durations:
    """A histogram: how many ended within each of `DURATION_BUCKETS`, how many in all, and their sum in seconds."""

    within: Sequence[int]
    count: int
    seconds: float


@dataclass(frozen=True)
class Totals:
    """Values by labels, in the order of the specification's label names."""

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
        jobs=jobs_by_reached_state(connection),
        gpu_hours=gpu_hours(connection),
        datasets=grouped(
            connection, select(dataset_versions.c.organization, func.count()).group_by(dataset_versions.c.organization)
        ),
        models=grouped(
            connection,
            # The newest number given out: versions that were deleted were registered all the same.
            select(registered_models.c.organization, func.sum(registered_models.c.last_version)).group_by(
                registered_models.c.organization
            ),
        ),
        durations=durations(connection),
        running=grouped(
            connection,
            select(TYPED.c.type, TYPED.c.organization, func.count())
            .where(TYPED.c.status == "running")
            .group_by(TYPED.c.type, TYPED.c.organization),
        ),
        gpus_allocated=gpus_allocated(connection),
        queued=queued(connection),
        stored_bytes=stored_bytes(connection),
    )


def grouped(connection: Connection, query: object) -> dict[Labels, float]:
    """Rows of labels and a number."""
    rows = connection.execute(query).all()  # type: ignore[call-overload]
    return {tuple(str(label) for label in row[:-1]): float(row[-1] or 0) for row in rows}


def jobs_by_reached_state(connection: Connection) -> dict[Labels, float]:
    query = (
        select(TYPED.c.type, events.c.type, TYPED.c.organization, func.count(distinct(events.c.key)))
        .select_from(events)
        .join(TYPED, TYPED.c.id == events.c.key)
        .where(events.c.type.in_(REACHED))
        .group_by(TYPED.c.type, events.c.type, TYPED.c.organization)
    )
    return {(kind, REACHED[event], org): count for (kind, event, org), count in grouped(connection, query).items()}


def gpu_hours(connection: Connection) -> dict[Labels, float]:
    """What the training containers measured (row E5)."""
    tag = run_tags.alias()
    query = (
        select(func.coalesce(tag.c.value, "unknown"), runs.c.organization, func.sum(latest_metrics.c.value))
        .select_from(latest_metrics)
        .join(runs, runs.c.id == latest_metrics.c.run_id)
        .outerjoin(tag, (tag.c.run_id == runs.c.id) & (tag.c.key == GPU_TYPE_TAG))
        .where(MEASURED_HOURS)
        .group_by(tag.c.value, runs.c.organization)
    )
    return grouped(connection, query)


def durations(connection: Connection) -> dict[str, Durations]:
    seconds = (TYPED.c.ended_at - TYPED.c.started_at) / 1000.0
    within = [func.sum(case((seconds <= bucket, 1), else_=0)) for bucket in DURATION_BUCKETS]
    query = (
        select(TYPED.c.type, func.count(), func.sum(seconds), *within)
        .where(TYPED.c.started_at.is_not(None), TYPED.c.ended_at.is_not(None))
        .group_by(TYPED.c.type)
    )
    return {
        row[0]: Durations([int(count) for count in row[3:]], int(row[1]), float(row[2])) for row in connection.execute(query)
    }


def gpus_allocated(connection: Connection) -> dict[Labels, float]:
    """From what running jobs asked for."""
    allocated: dict[Labels, float] = {}
    for (config,) in connection.execute(select(jobs.c.config).where(jobs.c.status == "running")):
        resources = config.get("resources")
        if isinstance(resources, dict) and isinstance(gpus := resources.get("gpus"), int) and gpus > 0:
            distributed = config.get("distributed")
            nodes = distributed.get("num_nodes") if isinstance(distributed, dict) else None
            labels = (str(resources.get("gpu_type", "unknown")),)
            allocated[labels] = allocated.get(labels, 0) + gpus * (nodes if isinstance(nodes, int) else 1)
    return allocated


def queued(connection: Connection) -> dict[Labels, float]:
    asked = jobs.c.config["schedule"]["priority"].as_string(), jobs.c.config["priority"].as_string()
    priority = func.coalesce(*asked).label("priority")
    inner = select(jobs.c.organization, priority).where(jobs.c.status == "queued").subquery()
    query = select(inner.c.organization, func.coalesce(inner.c.priority, DEFAULT_PRIORITY), func.count()).group_by(
        inner.c.organization, inner.c.priority
    )
    return grouped(connection, query)


def stored_bytes(connection: Connection) -> dict[str, float]:
    """Size of the recorded artifacts by the beginning of their URI: `s3://BUCKET/KIND`, or a bucket of its own."""
    place = case(
        (artifacts.c.uri.startswith(f"{uris.DATASETS}/"), "datasets"),
        (artifacts.c.uri.startswith(f"{uris.CHECKPOINTS}/"), "checkpoints"),
        (artifacts.c.uri.startswith(f"{uris.RUNS}/"), "checkpoints"),
        (artifacts.c.uri.startswith(f"{uris.MODELS}/"), "models"),
        else_="other",
    ).label("place")
    inner = select(place, artifacts.c.size_bytes).subquery()
    query = select(inner.c.place, func.sum(inner.c.size_bytes)).group_by(inner.c.place)
    return {place: total for (place,), total in grouped(connection, query).items() if place != "other"}
