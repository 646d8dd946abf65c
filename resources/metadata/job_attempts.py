"""Attempts of a program on a cluster: claim, register nodes, end.

The launcher of the gang's first pod claims a number, which fences off all earlier attempts: the API refuses their writes.
The end of an attempt is recorded once, by the first to know it: a launcher, or the controller if no pod could report it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from recipes.contracts.exit_reason import ExitReason
from resources.compute.base import ENDED_PHASES, JobKey
from resources.errors import conflict, not_found
from resources.metadata.database import Database
from resources.metadata.gpu_usage import close_usage, extend_running_gangs, extend_usage, open_usage
from resources.metadata.outbox import now_ms
from resources.metadata.started_event import emit_started
from resources.metadata.tables import cluster_jobs
from resources.metadata.tables import job_attempts as table

VAGUE_REASONS = (ExitReason.NODE_LOST, ExitReason.UNKNOWN)
"""Reported for a pod that vanished; a reason read from the pod's status replaces it."""
REPLACEABLE_REASONS = (*VAGUE_REASONS, ExitReason.PREEMPTED)
"""A launcher reports every SIGTERM as a preemption; the kubelet knows that its disk was full."""


def is_replaced(known: ExitReason | None, reason: ExitReason) -> bool:
    """Whether a later report replaces the recorded reason of an attempt that has ended."""
    if known is ExitReason.PREEMPTED:
        return reason is ExitReason.STORAGE_FULL
    return known in VAGUE_REASONS and reason not in VAGUE_REASONS


@dataclass(frozen=True)
class Attempt:
    """One start of a gang. `nodes` and `gpus` are by rank, None until registered."""

    job_id: str
    program: str
    attempt: int
    generation: int
    claimed_by: str
    nodes: Sequence[str | None]
    gpus: Sequence[Sequence[str] | None]
    started_at: int
    ended_at: int | None
    reason: ExitReason | None
    message: str
    counted: bool
    saved_at: int | None

    @property
    def is_registered(self) -> bool:
        """Whether every node of the gang has registered."""
        return None not in self.nodes


@dataclass(frozen=True)
class Claim:
    """The request of a launcher for an attempt; `pod_uid` makes it idempotent.

    Pods that need only the store to find each other (`shared`) restart alone, so they join the attempt of their generation
    instead of replacing it.
    """

    generation: int
    pod_uid: str
    node_rank: int
    num_nodes: int
    node: str
    gpus: Sequence[str] = ()
    shared: bool = False


class JobAttempts:
    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, job: JobKey, claim: Claim) -> Attempt:
        """Return the attempt of a gang's first pod; a new uid begins another attempt.

        Raises:
                HanzoError: 404 if there is no such program; 409 if it is cancelled, has ended or has newer pods.
        """
        with self._database.write() as connection:
            self._refuse_unwanted(connection, job, claim.generation)
            found = self._find_claimed(connection, job, claim)
            if found is None:
                found = self._insert(connection, job, claim)
            return self._register(connection, job, found, claim.node_rank, claim.node, claim.gpus)

    def register_node(self, job: JobKey, attempt: int, node_rank: int, node: str, gpus: Sequence[str]) -> Attempt:
        """Record the node and GPUs of a rank, and emit `job.started` once all have registered.

        Raises:
                HanzoError: 409 if the attempt is not the newest.
        """
        with self._database.write() as connection:
            self._lock(connection, job)
            return self._register(connection, job, self._get_newest(connection, job, attempt), node_rank, node, gpus)

    def report_exit(self, job: JobKey, attempt: int, reason: ExitReason, message: str) -> Attempt:
        """Record why an attempt ended, as reported by a pod.

        After a lost node, the remaining pods are asked to stop: their preemption is not recorded as the reason.

        Raises:
            HanzoError: 409 if the attempt is not the newest.
        """
        with self._database.write() as connection:
            self._lock(connection, job)
            known = self._get_newest(connection, job, attempt)
            if known.reason is ExitReason.NODE_LOST and reason is ExitReason.PREEMPTED:
                return known
            return self._end(connection, job, attempt, reason, message, reason.counts)

    def end(
        self,
        job: JobKey,
        attempt: int,
        reason: ExitReason,
        message: str,
        counted: bool | None = None,
        ended_at: int = 0,
    ) -> Attempt:
        """Record why an attempt ended, unless that is known (idempotent).

        By default, `counted` follows from the reason, and `ended_at` (milliseconds) is now. Time during which the control
        plane was down is not charged to the job.

        A definite reason replaces one of `VAGUE_REASONS`: survivors see only that a pod is gone, the cluster may know that
        it ran out of memory. A full disk replaces a preemption.
        """
        with self._database.write() as connection:
            self._lock(connection, job)
            counts = reason.counts if counted is None else counted
            return self._end(connection, job, attempt, reason, message, counts, ended_at)

    def record_checkpoint(self, job: JobKey, attempt: int) -> None:
        """Record that an attempt saved a checkpoint: earlier attempts no longer count as failed."""
        with self._database.write() as connection:
            self._update(connection, job, attempt, {"saved_at": now_ms()})

    def newest(self, job: JobKey) -> Attempt | None:
        with self._database.read() as connection:
            return find_newest(connection, job)

    def list(self, job: JobKey) -> Sequence[Attempt]:
        """Return all attempts, oldest first."""
        with self._database.read() as connection:
            rows = connection.execute(select(table).where(*_same_program(job)).order_by(table.c.attempt))
            return [to_attempt(row) for row in rows]

    def list_active(self) -> Mapping[tuple[str, str], Sequence[Attempt]]:
        """Return the attempts of all unended jobs, oldest first, by job id and program."""
        same = (cluster_jobs.c.job_id == table.c.job_id) & (cluster_jobs.c.program == table.c.program)
        query = select(table).join(cluster_jobs, same).where(cluster_jobs.c.phase.not_in(sorted(ENDED_PHASES)))
        found: dict[tuple[str, str], list[Attempt]] = {}
        with self._database.read() as connection:
            for row in connection.execute(query.order_by(table.c.job_id, table.c.program, table.c.attempt)):
                found.setdefault((row.job_id, row.program), []).append(to_attempt(row))
        return found

    def meter_gpus(self) -> None:
        """Record that all attempts that have not ended held their GPUs until now."""
        with self._database.write() as connection:
            extend_running_gangs(connection, now_ms())

    def _lock(self, connection: Connection, job: JobKey, *, fences: bool = False) -> Row[Any] | None:
        """Block other writers of the program's attempts until the transaction ends.

        With `fences`, also wait for writers of an attempt's objects (`resources.object_store.attempt_fence`). Only a claim
        does so, because a slow object store would hold up the controller.
        """
        row = cluster_jobs.c.job_id == job.id, cluster_jobs.c.program == job.program
        return connection.execute(select(cluster_jobs).where(*row).with_for_update(key_share=not fences)).first()

    def _refuse_unwanted(self, connection: Connection, job: JobKey, generation: int) -> None:
        row = self._lock(connection, job, fences=True)
        if row is None:
            raise not_found(f"program {job.program} of job '{job.id}' was not submitted to the cluster")
        if row.wanted != "run" or row.phase in ENDED_PHASES:
            raise conflict(f"{job.program} of job '{job.id}' is cancelled or over: no new attempt starts")
        if generation < row.generation:
            raise conflict(
                f"this pod belongs to generation {generation} of {job.program} {job.id}, "
                f"and generation {row.generation} has replaced it"
            )

    def _find_claimed(self, connection: Connection, job: JobKey, claim: Claim) -> Attempt | None:
        known = connection.execute(select(table).where(*_same_program(job), table.c.claimed_by == claim.pod_uid)).first()
        if known is not None:
            return to_attempt(known)
        newest = find_newest(connection, job) if claim.shared else None
        joins = newest is not None and newest.ended_at is None and newest.generation == claim.generation
        return newest if joins else None

    def _insert(self, connection: Connection, job: JobKey, claim: Claim) -> Attempt:
        newest = find_newest(connection, job)
        number = newest.attempt + 1 if newest else 1
        if newest is not None:
            message = f"attempt {number} replaced it before it reported how it ended"
            self._end(connection, job, newest.attempt, ExitReason.UNKNOWN, message, True)
        row = {
            "job_id": job.id,
            "program": job.program.value,
            "attempt": number,
            "generation": claim.generation,
            "claimed_by": claim.pod_uid,
            "nodes": [None] * claim.num_nodes,
            "gpus": [None] * claim.num_nodes,
            "started_at": now_ms(),
            "message": "",
            "counted": False,
        }
        connection.execute(insert(table).values(**row))
        made = self._get(connection, job, number)
        self._meter(connection, job, claim, made.started_at)
        return made

    def _meter(self, connection: Connection, job: JobKey, claim: Claim, started_at: int) -> None:
        row = cluster_jobs.c.job_id == job.id, cluster_jobs.c.program == job.program
        asked = connection.execute(select(cluster_jobs.c.document["hardware"]).where(*row)).scalar() or {}
        if gpus := asked.get("gpus", 0) * claim.num_nodes:
            open_usage(connection, job, claim.pod_uid, gpus, asked.get("gpu_type"), started_at)

    def _register(
        self, connection: Connection, job: JobKey, attempt: Attempt, node_rank: int, node: str, gpus: Sequence[str]
    ) -> Attempt:
        if node_rank >= len(attempt.nodes):
            raise conflict(
                f"node rank {node_rank} is not one of the {len(attempt.nodes)} nodes of attempt {attempt.attempt}"
            )
        nodes, all_gpus = [*attempt.nodes], [*attempt.gpus]
        nodes[node_rank], all_gpus[node_rank] = node, [*gpus]
        self._update(connection, job, attempt.attempt, {"nodes": nodes, "gpus": all_gpus})
        emit_started(connection, job.id)
        return self._get(connection, job, attempt.attempt)

    def _end(
        self,
        connection: Connection,
        job: JobKey,
        attempt: int,
        reason: ExitReason,
        message: str,
        counted: bool,
        ended_at: int = 0,
    ) -> Attempt:
        known = self._get(connection, job, attempt)
        if known.ended_at is None or is_replaced(known.reason, reason):
            until = known.ended_at or max(ended_at or now_ms(), known.started_at)
            extend_usage(connection, job, until, known.claimed_by)
            close_usage(connection, job, known.claimed_by)
            self._update(
                connection,
                job,
                attempt,
                {"ended_at": until, "reason": reason.value, "message": message, "counted": counted},
            )
        return self._get(connection, job, attempt)

    def _update(self, connection: Connection, job: JobKey, attempt: int, values: Mapping[str, Any]) -> None:
        connection.execute(update(table).where(*_same_program(job), table.c.attempt == attempt).values(**values))

    def _get(self, connection: Connection, job: JobKey, attempt: int) -> Attempt:
        row = connection.execute(select(table).where(*_same_program(job), table.c.attempt == attempt)).first()
        if row is None:
            raise not_found(f"program {job.program} of job '{job.id}' has no attempt {attempt}")
        return to_attempt(row)

    def _get_newest(self, connection: Connection, job: JobKey, attempt: int) -> Attempt:
        found, newest = self._get(connection, job, attempt), find_newest(connection, job)
        if newest is not None and newest.attempt > attempt:
            raise conflict(f"attempt {attempt} of {job.program} {job.id} is over: attempt {newest.attempt} has replaced it")
        return found


def find_newest(connection: Connection, job: JobKey) -> Attempt | None:
    """Return the newest attempt of a program, in the caller's transaction."""
    row = connection.execute(select(table).where(*_same_program(job)).order_by(table.c.attempt.desc()).limit(1)).first()
    return to_attempt(row) if row else None


def to_attempt(row: Row[Any]) -> Attempt:
    values = dict(row._mapping)
    return Attempt(**{**values, "reason": ExitReason(values["reason"]) if values["reason"] else None})


def _same_program(job: JobKey) -> tuple[Any, Any]:
    return table.c.job_id == job.id, table.c.program == job.program.value
