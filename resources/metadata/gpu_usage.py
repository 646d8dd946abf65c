"""Record which GPUs job attempts held and how long, for GPU hours.

A run's metric cannot serve: any user who may log to the run can write any number.
"""

from typing import Any

from sqlalchemy import Connection, select, update

from resources.compute.base import JobKey
from resources.metadata.tables import cluster_jobs, job_attempts
from resources.metadata.tables import gpu_usage as table
from resources.metadata.transactions import insert_into

EXTEND_SECONDS = 60.0
"""Interval at which the time of running attempts is recorded."""


def open_usage(connection: Connection, job: JobKey, attempt: str, gpus: int, gpu_type: str | None, started_at: int) -> None:
    """Record that an attempt holds GPUs, on all its nodes together (idempotent)."""
    row = {
        "attempt": attempt,
        "job_id": job.id,
        "program": job.program.value,
        "owner_id": owner_id(job),
        "gpus": gpus,
        "gpu_type": gpu_type or "unknown",
        "started_at": started_at,
        "metered_until": started_at,
        "is_open": True,
    }
    connection.execute(insert_into(connection, table).values(**row).on_conflict_do_nothing())


def extend_usage(connection: Connection, job: JobKey, until: int, attempt: str | None = None) -> None:
    """Move the end of open usage forward, never back: it is a counter."""
    extended = update(table).where(*_open_rows(job, attempt), table.c.metered_until < until).values(metered_until=until)
    connection.execute(extended)


def extend_running_gangs(connection: Connection, until: int) -> None:
    """Call `extend_usage` for every unended attempt on the cluster, in one statement."""
    running = (
        select(job_attempts.c.claimed_by)
        .join(
            cluster_jobs,
            (cluster_jobs.c.job_id == job_attempts.c.job_id) & (cluster_jobs.c.program == job_attempts.c.program),
        )
        .where(job_attempts.c.ended_at.is_(None))
    )
    extended = update(table).where(table.c.is_open, table.c.attempt.in_(running), table.c.metered_until < until)
    connection.execute(extended.values(metered_until=until))


def close_usage(connection: Connection, job: JobKey, attempt: str | None = None) -> None:
    """Record that an attempt, or every attempt of the job, has released its GPUs."""
    connection.execute(update(table).where(*_open_rows(job, attempt)).values(is_open=False))


def owner_id(job: JobKey) -> str:
    """Return the id of the submitted job, and tracking run, that a program works for.

    `evaluate-ID` belongs to ID.
    """
    return job.id.removeprefix(f"{job.program.value}-".replace("_", "-"))


def _open_rows(job: JobKey, attempt: str | None) -> tuple[Any, ...]:
    of_job = table.c.job_id == job.id, table.c.program == job.program.value, table.c.is_open
    return of_job if attempt is None else (*of_job, table.c.attempt == attempt)
