"""Jobs: what a user asked for and how it stands. The id of a training job, and of a command, is the id of its tracking run;
others have none.

Whatever changes a job writes its event in the same transaction (specification row Q1). How a job is run is the asset
graph's business.
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
"""Key of a job's configuration: what it is trained on."""
DELETED_EVENT = "job.deleted"
"""The event by which a job is known to be deleted."""


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
        """Record a job and, of a type that is tracked, its run with `tags`: in `experiment`, or that of the job's name.

        A job of that id that is there already stays as it is. That of a click in the Dagster UI is recorded while its run
        waits there, or as `running` by its supervisor; the sensor starts neither a second time.
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
        """`get`, and nobody else changes the job until the transaction ends: what is decided by its state stays true.

        Whoever holds a job's run too holds the job first.
        """
        lock = select(table.c.id).where(table.c.id == identifier).with_for_update(key_share=True)
        connection.execute(lock)
        return self.get(identifier, connection)

    def read(self, identifier: str) -> JobRecord:
        """`get` in a transaction of its own."""
        with self._database.read() as connection:
            return self.get(identifier, connection)

    def find_by_id(self, identifier: str | None) -> JobRecord | None:
        """`find` in a transaction of its own; None also where no id is given."""
        if identifier is None:
            return None
        with self._database.read() as connection:
            return self.find(identifier, connection)

    def page(
        self, organization: str, status: str | None = None, *, limit: int = MAX_PAGE, page_token: str | None = None
    ) -> tuple[list[JobRecord], str | None]:
        """Jobs, newest first, but for those that were deleted, and where the next page begins."""
        if status is not None and status not in STATUSES:
            raise invalid(f"status '{status}' is unknown: use one of {', '.join(STATUSES)}")
        # Asked of each job of the page: to gather all that were ever deleted costs more than the page. PostgreSQL would do
        # that all the same for a `NOT EXISTS`, by a plan that it made while there were few.
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
        """All queued jobs, oldest first."""
        query = select(table).where(table.c.status == "queued").order_by(table.c.submitted_at)
        return [JobRecord(**row) for row in connection.execute(query).mappings()]

    def active(self, connection: Connection) -> Sequence[JobRecord]:
        """All jobs with a run that are queued or running, of every organization."""
        query = select(table).where(table.c.status.in_(ACTIVE_STATUSES), table.c.type.in_(TRACKED_TYPES))
        return [JobRecord(**row) for row in connection.execute(query).mappings()]

    def list_failed_or_cancelled(self, since: int, connection: Connection) -> Sequence[JobRecord]:
        """All jobs that failed or were cancelled since a time in milliseconds, of every organization."""
        ended = (table.c.status.in_(("failed", "cancelled")), table.c.ended_at >= since)
        return [JobRecord(**row) for row in connection.execute(select(table).where(*ended)).mappings()]

    def running(self, type: str, connection: Connection) -> Sequence[JobRecord]:
        """All jobs of a type that run, of every organization."""
        query = select(table).where(table.c.status == "running", table.c.type == type)
        return [JobRecord(**row) for row in connection.execute(query).mappings()]

    def last_started_at(self, job: JobRecord, connection: Connection) -> int:
        """When a job was started last, in milliseconds: `started_at` stays that of the first time."""
        query = select(func.max(events.c.created_at)).where(events.c.type == "job.started", events.c.key == job.id)
        return connection.execute(query).scalar() or job.started_at or job.submitted_at

    def resumed_at(self, identifier: str, connection: Connection) -> int:
        """When a job was resumed last, in milliseconds; 0 where it never was."""
        query = select(func.max(events.c.created_at)).where(events.c.type == "job.resumed", events.c.key == identifier)
        return connection.execute(query).scalar() or 0

    def set_config_value(self, identifier: str, key: str, value: JsonValue) -> None:
        """Say in a job's configuration what it left open when it was submitted, unless it has ended."""
        with self._database.write() as connection:
            job = self.get_locked(identifier, connection)
            if job.status in ACTIVE_STATUSES and job.config.get(key) != value:
                config = {**job.config, key: value}
                connection.execute(update(table).where(table.c.id == identifier).values(config=config))

    def set_waiting_reason(self, identifier: str, reason: str, status: Literal["queued", "running"] = "queued") -> None:
        """Say why a job does not start yet; of one that is `running`, for what its program waits, or nothing any more."""
        with self._database.write() as connection:
            held = (table.c.id == identifier, table.c.status == status, table.c.reason != reason)
            connection.execute(update(table).where(*held).values(reason=reason))

    def start(self, identifier: str) -> JobRecord:
        """Queued or failed -> running. One that runs or is completed stays as it is: its supervisor came back, or again."""
        with self._database.write() as connection:
            job = self.get_locked(identifier, connection)
            if job.status == "cancelled":
                raise conflict(f"job '{identifier}' was cancelled: `hanzo-ml job resume {identifier}` goes on with it")
            if job.status not in ("running", "completed"):
                values = {"status": "running", "started_at": job.started_at or now_ms(), "ended_at": None, "reason": ""}
                connection.execute(update(table).where(table.c.id == identifier).values(**values))
                self._update_run(job, "running", connection)
                emit_started(connection, identifier)
            return self.get(identifier, connection)

    def resume(self, identifier: str, resumed: ResumeHistory, facts: Mapping[str, Any]) -> JobRecord:
        """Failed or cancelled -> queued, to go on as `resumed` says; `facts` are for whoever reads its event.

        Its run stays as it ended until the job starts, and keeps the time of its first start.
        """
        with self._database.write() as connection:
            job = self.get_locked(identifier, connection)
            if job.status not in ("failed", "cancelled") or job.resumed.times + 1 != resumed.times:
                raise conflict(f"job '{identifier}' is {job.status}: somebody else was faster")
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
        """Running -> completed, in the caller's transaction. A job that has ended already, cancelled too, stays as it is."""
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
        """Any state but an ended one -> failed."""
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
        """Any state but an ended one -> cancelled; whoever runs it is told by the event."""
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
        """An ended job is listed no more. Its record stays: its run, and the models made of it, are traced back to it."""
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
        """Tell everybody that a completed job is being evaluated."""
        with self._database.write() as connection:
            connection.execute(update(table).where(table.c.id == identifier).values(reason=""))
            emit(connection, "models", "evaluation.started", identifier, {"job_id": identifier, "run_id": identifier})

    def fail_evaluation(self, identifier: str, reason: str) -> None:
        """A completed job whose evaluation, registration or export ended in an error: it says why, once for each reason."""
        with self._database.write() as connection:
            job = self.get_locked(identifier, connection)
            if job.status != "completed" or job.reason == reason:
                return
            connection.execute(update(table).where(table.c.id == identifier).values(reason=reason))
            emit(connection, "models", "evaluation.failed", identifier, {"job_id": identifier, "error": reason})

    def set_evaluation(self, connection: Connection, identifier: str, evaluation: Mapping[str, Any]) -> None:
        """Record the report and the gate's verdict. An equal one that is there already writes no second event."""
        if self.get(identifier, connection).evaluation == dict(evaluation):
            return
        connection.execute(update(table).where(table.c.id == identifier).values(evaluation=dict(evaluation)))
        facts = {"job_id": identifier, "run_id": identifier, "verdict": evaluation["verdict"]}
        emit(connection, "models", "evaluation.completed", identifier, facts)
