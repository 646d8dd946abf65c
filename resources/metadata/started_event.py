"""The event `job.started`, with the nodes and GPUs of a job.

On a cluster two things must have happened, in any order: the job's supervisor has started it, and every node of its gang has
registered. The second of them emits the event. On one machine a job starts with its supervisor, on unnamed nodes.
"""

from typing import Any

from sqlalchemy import Connection, select

from resources.metadata.outbox import emit
from resources.metadata.tables import cluster_jobs, events, job_attempts, jobs

STARTED_EVENT = "job.started"
STATE_EVENTS = ("job.submitted", STARTED_EVENT, "job.resumed", "job.completed", "job.failed", "job.cancelled")
OWN_PROGRAMS = ("train", "command", "prepare")
"""Programs for which jobs are submitted; evaluation and conversion belong to a job that has started before."""


def emit_started(connection: Connection, job_id: str, *, has_ended: bool = False) -> None:
    """Emit `job.started` once, when the job runs and its nodes are known.

    Writes in the caller's transaction. `has_ended`: the job is about to end, and a short attempt can be over before its
    supervisor has started it.
    """
    status = connection.execute(select(jobs.c.status).where(jobs.c.id == job_id)).scalar()
    placement = find_placement(connection, job_id, has_ended=has_ended) if status == "running" else None
    if placement is None or _newest_state(connection, job_id) == STARTED_EVENT:
        return
    emit(connection, "jobs", STARTED_EVENT, job_id, {"job_id": job_id, **placement})


def find_placement(connection: Connection, job_id: str, *, has_ended: bool = False) -> dict[str, list[str]] | None:
    """Return nodes and GPUs of a job's newest attempt, None until all have registered."""
    program = select(cluster_jobs.c.program).where(cluster_jobs.c.job_id == job_id, cluster_jobs.c.program.in_(OWN_PROGRAMS))
    on_cluster = connection.execute(program).scalar()
    if on_cluster is None:
        return None if has_ended else {"node_ids": [], "gpu_ids": []}
    newest: Any = connection.execute(
        select(job_attempts.c.nodes, job_attempts.c.gpus, job_attempts.c.ended_at)
        .where(job_attempts.c.job_id == job_id, job_attempts.c.program == on_cluster)
        .order_by(job_attempts.c.attempt.desc())
        .limit(1)
    ).first()
    if newest is None or (newest.ended_at is not None and not has_ended) or None in newest.nodes:
        return None
    return {"node_ids": [*newest.nodes], "gpu_ids": [gpu for node in newest.gpus for gpu in node or ()]}


def _newest_state(connection: Connection, job_id: str) -> str | None:
    query = select(events.c.type).where(events.c.key == job_id, events.c.type.in_(STATE_EVENTS))
    return connection.execute(query.order_by(events.c.seq.desc()).limit(1)).scalar()
