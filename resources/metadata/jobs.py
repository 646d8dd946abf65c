"""Store jobs and their state transitions.

The id of a training job or command is the id of its tracking run; other jobs have no run. Each change of a job writes its
event in the same transaction. The asset graph runs the jobs.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import JsonValue
from sqlalchemy import Connection, func, select, update

from recipes.storage.manifest import Artifact
from resources.errors import conflict, invalid, not_found
from resources.metadata.database import Database
from resources.metadata.field_rules import refuse_unstorable
from resources.metadata.filters.pagination import Keyset, SortKey
from resources.metadata.job_record import (
    COMMAND,
    PREPARATION,
    REPLAY_OF,
    RESUMED_KEY,
    TRAINING,
    JobRecord,
    ResumeHistory,
    mask_config,
)
from resources.metadata.outbox import emit, now_ms
from resources.metadata.started_event import emit_started
from resources.metadata.tables import events
from resources.metadata.tables import jobs as table
from resources.metadata.tracking.runs import Runs
from resources.metadata.transactions import insert_into, writing

__all__ = ["COMMAND", "PREPARATION", "REPLAY_OF", "TRAINING", "JobRecord", "Jobs"]

MAX_PAGE = 1000
STATUSES = ("queued", "running", "completed", "failed", "cancelled")
ACTIVE_STATUSES = ("queued", "running")
ENDED_STATUSES = ("completed", "failed", "cancelled")
TRACKED_TYPES = (TRAINING, COMMAND)
"""Types of jobs that have a tracking run."""
DATASET_KEY = "dataset"
"""Key in a job's configuration of the dataset on which it trains."""
DELETED_EVENT = "job.deleted"
"""The type of the event that marks a job as deleted."""


class Jobs:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._runs = Runs(database)

    def submit(
        self,
        *,
        name: str,
        config: Mapping[str, Any],
        user: str,
        organization: str,
        id: str | None = None,
        status: str = "queued",
        type: str = TRAINING,
        experiment: str | None = None,
        tags: Mapping[str, str] | None = None,
        connection: Connection | None = None,
    ) -> JobRecord:
        """Record a job and, if its type is tracked, its run with `tags`.

        The run is created in `experiment`, or in one with the job's name. If a job with this id exists, it is returned
        unchanged. A job that was started in the Dagster UI is recorded while its Dagster run is queued, or as `running` by
        its supervisor, so that the sensor does not start it a second time.
        """
        refuse_unstorable([name, dict(config)], "config")
        identifier = id or uuid.uuid4().hex
        with writing(self._database, connection) as writer:
            row = {
                "id": identifier,
                "name": name,
                "type": type,
                "status": status,
                "config": dict(config),
                "user_id": user,
                "organization": organization,
                "submitted_at": now_ms(),
                "started_at": None if status == "queued" else now_ms(),
                "reason": "",
                "artifacts": {},
            }
            insert = insert_into(writer, table).values(**row).on_conflict_do_nothing().returning(table.c.id)
            if writer.execute(insert).first():
                if type in TRACKED_TYPES:
                    home = experiment or name
                    self._runs.ensure(identifier, home, name, user, organization, tags, status=status, connection=writer)
                facts = {"job_id": identifier, "user_id": user, "config": mask_config(config)}
                emit(writer, "jobs", "job.submitted", identifier, facts)
            return self.get(identifier, writer)

    def find(self, identifier: str, connection: Connection) -> JobRecord | None:
        row = connection.execute(select(table).where(table.c.id == identifier)).mappings().first()
        return JobRecord(**row) if row else None

    def get(self, identifier: str, connection: Connection) -> JobRecord:
        found = self.find(identifier, connection)
        if found is None:
            raise not_found(f"there is no job '{identifier}': see `hanzo-ml job list`")
        return found

    def get_locked(self, identifier: str, connection: Connection) -> JobRecord:
        """Call `get`, and lock the job until the transaction ends.

        So decisions based on its state stay valid. Code that also locks the job's run must lock the job first.
        """
        lock = select(table.c.id).where(table.c.id == identifier).with_for_update(key_share=True)
        connection.execute(lock)
        return self.get(identifier, connection)

    def read(self, identifier: str) -> JobRecord:
        """Call `get` in a transaction of its own."""
        with self._database.read() as connection:
            return self.get(identifier, connection)

    def find_by_id(self, identifier: str | None) -> JobRecord | None:
        """Call `find` in a transaction of its own; None without an id."""
        if identifier is None:
            return None
        with self._database.read() as connection:
            return self.find(identifier, connection)

    def page(
        self, organization: str, status: str | None = None, *, limit: int = MAX_PAGE, page_token: str | None = None
    ) -> tuple[list[JobRecord], str | None]:
        """Return jobs without deleted ones, newest first, and the token of the next page."""
        if status is not None and status not in STATUSES:
            raise invalid(f"status '{status}' is unknown: use one of {', '.join(STATUSES)}")
        # A subquery for each job of the page: collecting all deleted jobs costs more than the page. For a `NOT EXISTS`,
        # PostgreSQL would collect them, with a plan that it made while there were few.
        deleted = select(events.c.seq).where(events.c.key == table.c.id, events.c.type == DELETED_EVENT).limit(1)
        query = select(table).where(table.c.organization == organization, deleted.scalar_subquery().is_(None))
        if status:
            query = query.where(table.c.status == status)
        order = Keyset([SortKey(table.c.submitted_at, False, int), SortKey(table.c.id, False, str)], (organization, status))
        with self._database.read() as connection:
            rows = connection.execute(order.page(query, limit, page_token)).all()
        columns = tuple(table.c.keys())
        found = [JobRecord(**dict(zip(columns, row, strict=False))) for row in rows[:limit]]
        return found, order.next_token(rows, limit)

    def queued(self, connection: Connection) -> Sequence[JobRecord]:
        """Return all queued jobs, oldest first."""
        query = select(table).where(table.c.status == "queued").order_by(table.c.submitted_at)
        return [JobRecord(**row) for row in connection.execute(query).mappings()]

    def active(self, connection: Connection) -> Sequence[JobRecord]:
        """Return all tracked jobs that are queued or running, of all organizations."""
        query = select(table).where(table.c.status.in_(ACTIVE_STATUSES), table.c.type.in_(TRACKED_TYPES))
        return [JobRecord(**row) for row in connection.execute(query).mappings()]

    def list_failed_or_cancelled(self, since: int, connection: Connection) -> Sequence[JobRecord]:
        """Return the jobs of all organizations that failed or were cancelled since a time.

        The time is in milliseconds since 1970.
        """
        ended = (table.c.status.in_(("failed", "cancelled")), table.c.ended_at >= since)
        return [JobRecord(**row) for row in connection.execute(select(table).where(*ended)).mappings()]

    def running(self, type: str, connection: Connection) -> Sequence[JobRecord]:
        """Return all running jobs of a type, of all organizations."""
        query = select(table).where(table.c.status == "running", table.c.type == type)
        return [JobRecord(**row) for row in connection.execute(query).mappings()]

    def last_started_at(self, job: JobRecord, connection: Connection) -> int:
        """Return when a job was last started (ms since 1970).

        `started_at` is the time of its first start.
        """
        query = select(func.max(events.c.created_at)).where(events.c.type == "job.started", events.c.key == job.id)
        return connection.execute(query).scalar() or job.started_at or job.submitted_at

    def resumed_at(self, identifier: str, connection: Connection) -> int:
        """Return when a job was last resumed (ms since 1970), or 0."""
        query = select(func.max(events.c.created_at)).where(events.c.type == "job.resumed", events.c.key == identifier)
        return connection.execute(query).scalar() or 0

    def set_config_value(self, identifier: str, key: str, value: JsonValue) -> None:
        """Set a configuration key that the submission left open, unless the job has ended."""
        with self._database.write() as connection:
            job = self.get_locked(identifier, connection)
            if job.status in ACTIVE_STATUSES and job.config.get(key) != value:
                config = {**job.config, key: value}
                connection.execute(update(table).where(table.c.id == identifier).values(config=config))

    def set_waiting_reason(self, identifier: str, reason: str, status: Literal["queued", "running"] = "queued") -> None:
        """Record what a queued job, or a running job's program, waits for.

        Empty if for nothing.
        """
        with self._database.write() as connection:
            held = (table.c.id == identifier, table.c.status == status, table.c.reason != reason)
            connection.execute(update(table).where(*held).values(reason=reason))

    def start(self, identifier: str) -> JobRecord:
        """Set a queued or failed job to running.

        A running or completed job is returned unchanged: its supervisor restarted.
        """
        with self._database.write() as connection:
            job = self.get_locked(identifier, connection)
            if job.status == "cancelled":
                raise conflict(f"job '{identifier}' was cancelled: `hanzo-ml job resume {identifier}` resumes it")
            if job.status not in ("running", "completed"):
                values = {"status": "running", "started_at": job.started_at or now_ms(), "ended_at": None, "reason": ""}
                connection.execute(update(table).where(table.c.id == identifier).values(**values))
                self._update_run(job, "running", connection)
                emit_started(connection, identifier)
            return self.get(identifier, connection)

    def resume(self, identifier: str, resumed: ResumeHistory, facts: Mapping[str, Any]) -> JobRecord:
        """Set a failed or cancelled job to queued, to resume as `resumed` states.

        `facts` are added to the event. Its run keeps its final status until the job starts, and the time of its first start.
        """
        with self._database.write() as connection:
            job = self.get_locked(identifier, connection)
            if job.status not in ("failed", "cancelled") or job.resumed.times + 1 != resumed.times:
                raise conflict(f"job '{identifier}' is {job.status}: it was changed meanwhile")
            if self._is_deleted(identifier, connection):
                raise conflict(f"job '{identifier}' is deleted: submit a new one")
            config = {**job.config, RESUMED_KEY: resumed.model_dump(mode="json")}
            values = {"status": "queued", "ended_at": None, "reason": "", "config": config}
            connection.execute(update(table).where(table.c.id == identifier).values(**values))
            emit(connection, "jobs", "job.resumed", identifier, {"job_id": identifier, **facts})
            return self.get(identifier, connection)

    def complete(
        self,
        connection: Connection,
        identifier: str,
        artifacts: Mapping[str, Artifact],
        training_seconds: float,
        gpu_hours: float = 0.0,
    ) -> None:
        """Set a running job to completed, in the caller's transaction.

        A job that has ended, or was cancelled, is unchanged.
        """
        job = self.get_locked(identifier, connection)
        if job.status in ENDED_STATUSES:
            return
        emit_started(connection, identifier, has_ended=True)
        ended = now_ms()
        stored = {role: artifact.model_dump() for role, artifact in artifacts.items()}
        values = {"status": "completed", "ended_at": ended, "artifacts": stored, "reason": ""}
        connection.execute(update(table).where(table.c.id == identifier).values(**values))
        self._update_run(job, "completed", connection)
        duration = (ended - (job.started_at or job.submitted_at)) / 1000
        facts = {"job_id": identifier, "duration": duration, "training_seconds": training_seconds, "gpu_hours": gpu_hours}
        emit(connection, "jobs", "job.completed", identifier, facts)

    def fail(self, identifier: str, reason: str) -> None:
        """Set a job that has not ended to failed."""
        with self._database.write() as connection:
            job = self.get_locked(identifier, connection)
            if job.status in ENDED_STATUSES:
                return
            emit_started(connection, identifier, has_ended=True)
            values = {"status": "failed", "ended_at": now_ms(), "reason": reason}
            connection.execute(update(table).where(table.c.id == identifier).values(**values))
            self._update_run(job, "failed", connection)
            emit(connection, "jobs", "job.failed", identifier, {"job_id": identifier, "error": reason})

    def cancel(
        self, identifier: str, reason: str = "cancelled by the user", *, connection: Connection | None = None
    ) -> JobRecord:
        """Set a job that has not ended to cancelled.

        Its supervisor learns of it from the event.
        """
        with writing(self._database, connection) as writer:
            job = self.get_locked(identifier, writer)
            if job.status in ENDED_STATUSES:
                raise conflict(f"job '{identifier}' is {job.status} already")
            values = {"status": "cancelled", "ended_at": now_ms(), "reason": reason}
            writer.execute(update(table).where(table.c.id == identifier).values(**values))
            self._update_run(job, "cancelled", writer)
            emit(writer, "jobs", "job.cancelled", identifier, {"job_id": identifier})
            return self.get(identifier, writer)

    def delete(self, identifier: str) -> None:
        """Remove an ended job from lists.

        Its record is kept: the lineage of its run and models refers to it.
        """
        with self._database.write() as connection:
            job = self.get(identifier, connection)
            if job.status not in ENDED_STATUSES:
                raise conflict(f"job '{identifier}' is {job.status}: cancel it first")
            if not self._is_deleted(identifier, connection):
                emit(connection, "jobs", DELETED_EVENT, identifier, {"job_id": identifier})

    def _is_deleted(self, identifier: str, connection: Connection) -> bool:
        deletion = select(events.c.seq).where(events.c.type == DELETED_EVENT, events.c.key == identifier)
        return connection.execute(deletion).first() is not None

    def _update_run(self, job: JobRecord, status: str, connection: Connection) -> None:
        if job.type in TRACKED_TYPES:
            self._runs.follow_job(job.id, status, connection)

    def start_evaluation(self, identifier: str) -> None:
        """Publish that a completed job is being evaluated."""
        with self._database.write() as connection:
            connection.execute(update(table).where(table.c.id == identifier).values(reason=""))
            emit(connection, "models", "evaluation.started", identifier, {"job_id": identifier, "run_id": identifier})

    def fail_evaluation(self, identifier: str, reason: str) -> None:
        """Record why the evaluation, registration or export of a completed job failed.

        An event is written once for each reason.
        """
        with self._database.write() as connection:
            job = self.get_locked(identifier, connection)
            if job.status != "completed" or job.reason == reason:
                return
            connection.execute(update(table).where(table.c.id == identifier).values(reason=reason))
            emit(connection, "models", "evaluation.failed", identifier, {"job_id": identifier, "error": reason})

    def set_evaluation(self, connection: Connection, identifier: str, evaluation: Mapping[str, Any]) -> None:
        """Record the report and the gate's verdict.

        If they are equal to the recorded ones, no event is written.
        """
        if self.get(identifier, connection).evaluation == dict(evaluation):
            return
        connection.execute(update(table).where(table.c.id == identifier).values(evaluation=dict(evaluation)))
        facts = {"job_id": identifier, "run_id": identifier, "verdict": evaluation["verdict"]}
        emit(connection, "models", "evaluation.completed", identifier, facts)
