"""Jobs on a cluster: one row per job id and program, from submission to end.

`KubernetesCompute` writes the wanted state of a job, the cluster's controller the observed state; other code only reads.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, and_, func, select, update

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Job, Program
from resources.compute.base import ENDED_PHASES, JobKey, Observation, Phase
from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.tables import cluster_jobs as table
from resources.metadata.transactions import insert_into, reading, writing

RUN, CANCEL, NOTHING = "run", "cancel", "nothing"
"""Wanted state of a job. `NOTHING`: its end was reported, so the next submission restarts it."""


GenerationKey = tuple[str, Program, int]
"""Key of all objects of a job's generation: job id, program and generation."""


@dataclass(frozen=True)
class ClusterJob:
    """A row without the job's document (see `ClusterJobs.document`). Times in milliseconds."""

    job_id: str
    program: Program
    namespace: str
    name: str
    generation: int
    wanted: str
    phase: Phase
    detail: str
    reason: ExitReason | None
    attempt: int
    queue_position: int | None
    admitted_at: int | None
    created_at: int
    updated_at: int

    @property
    def id(self) -> str:
        """Half of the job's key in a compute backend (`JobKey`)."""
        return self.job_id

    @property
    def generation_key(self) -> GenerationKey:
        return self.job_id, self.program, self.generation

    @property
    def has_ended(self) -> bool:
        return self.phase in ENDED_PHASES

    @property
    def is_queued(self) -> bool:
        """Whether it waits for its first admission: false if it ended before."""
        return self.phase is Phase.PENDING and self.admitted_at is None

    @property
    def state(self) -> "JobState":
        return JobState(self.phase, self.detail, self.reason, self.attempt, self.queue_position, self.admitted_at)

    @property
    def observation(self) -> Observation:
        return Observation(self.phase, self.attempt, self.detail, self.reason)


@dataclass(frozen=True)
class JobState:
    """The columns that the controller writes, always together."""

    phase: Phase
    detail: str = ""
    reason: ExitReason | None = None
    attempt: int = 0
    queue_position: int | None = None
    admitted_at: int | None = None


COLUMNS = [column for column in table.c if column.name != "document"]
NOT_ENDED = table.c.phase.not_in(sorted(ENDED_PHASES))


class ClusterJobs:
    def __init__(self, database: Database) -> None:
        self._database = database

    def submit(self, job: Job, namespace: str, name: str) -> ClusterJob:
        """Record that a job should run.

        A job with equal work that is already wanted is left unchanged, even if its failure is unreported. Different work,
        and a job that was cancelled or whose end was reported, begin a new generation: cluster objects with new names,
        which cannot be confused with the earlier ones.
        """
        now, document = now_ms(), job.model_dump(mode="json")
        fresh = {
            "namespace": namespace,
            "name": name,
            "document": document,
            "wanted": RUN,
            "phase": Phase.PENDING,
            "detail": "",
            "reason": None,
            "queue_position": None,
            "admitted_at": None,
            "created_at": now,
            "updated_at": now,
        }
        with self._database.write() as connection:
            row = {"job_id": job.id, "program": job.program, "generation": 1, "attempt": 0, **fresh}
            inserted = insert_into(connection, table).values(**row).on_conflict_do_nothing().returning(table.c.job_id)
            if connection.execute(inserted).first() is None:
                connection.execute(select(table.c.job_id).where(_key(job)).with_for_update())
                found = self.get(job, connection)
                same_work = self.document(job, connection).work_digest == job.work_digest
                if found.wanted != RUN or not same_work:
                    again = update(table).where(_key(job)).values(**fresh, generation=found.generation + 1)
                    connection.execute(again)
            return self.get(job, connection)

    def restart(self, job: Job, generation: int) -> bool:
        """Begin a new generation of a job that continues, for example with fewer nodes.

        Unlike `submit`, it keeps the elapsed time limit and the counted attempts. Returns False if `generation` is not the
        newest.
        """
        values = {"document": job.model_dump(mode="json"), "generation": generation + 1, "updated_at": now_ms()}
        with self._database.write() as connection:
            changed = update(table).where(_key(job), table.c.generation == generation, table.c.wanted == RUN, NOT_ENDED)
            return bool(connection.execute(changed.values(**values).returning(table.c.job_id)).first())

    def want_cancel(self, job: JobKey) -> None:
        """Request cancellation; a job that has ended or was never submitted is left unchanged."""
        with self._database.write() as connection:
            wanted = update(table).where(_key(job), table.c.wanted == RUN, NOT_ENDED)
            connection.execute(wanted.values(wanted=CANCEL, updated_at=now_ms()))

    def acknowledge_end(self, job: JobKey) -> None:
        """Record that a job's end was reported, so that its next submission restarts it."""
        with self._database.write() as connection:
            ended = update(table).where(_key(job), ~NOT_ENDED)
            connection.execute(ended.values(wanted=NOTHING, updated_at=now_ms()))

    def set_state(self, job: ClusterJob, state: JobState, connection: Connection | None = None) -> bool:
        """Write a job's state unless it has ended or has a newer generation.

        Returns whether it was written.
        """
        values = {**state.__dict__, "updated_at": now_ms()}
        with writing(self._database, connection) as writer:
            changed = update(table).where(_key(job), table.c.generation == job.generation, NOT_ENDED)
            return bool(writer.execute(changed.values(**values).returning(table.c.job_id)).first())

    def find(self, job: JobKey, connection: Connection | None = None) -> ClusterJob | None:
        with reading(self._database, connection) as reader:
            row = reader.execute(select(*COLUMNS).where(_key(job))).mappings().first()
            return _read(row) if row else None

    def get(self, job: JobKey, connection: Connection | None = None) -> ClusterJob:
        """Return a job's row. Raises FileNotFoundError if it was never submitted."""
        found = self.find(job, connection)
        if found is None:
            raise FileNotFoundError(f"{job.program} {job.id} was never submitted to the cluster")
        return found

    def document(self, job: JobKey, connection: Connection | None = None) -> Job:
        """Return the submitted job. Raises FileNotFoundError if it was never submitted."""
        with reading(self._database, connection) as reader:
            document = reader.execute(select(table.c.document).where(_key(job))).scalar_one_or_none()
        if document is None:
            raise FileNotFoundError(f"{job.program} {job.id} was never submitted to the cluster")
        return Job.model_validate_json(json.dumps(document))

    def active(self, connection: Connection | None = None) -> list[ClusterJob]:
        """Return all jobs that have not ended, oldest first."""
        return self._list(select(*COLUMNS).where(NOT_ENDED).order_by(table.c.created_at, table.c.job_id), connection)

    def list_wanted(self, job_ids: Collection[str], connection: Connection | None = None) -> list[ClusterJob]:
        """Return the wanted programs of these jobs: neither cancelled nor reported as ended."""
        return self._list(select(*COLUMNS).where(table.c.job_id.in_(job_ids), table.c.wanted == RUN), connection)

    def list_programs(self, job_id: str, connection: Connection | None = None) -> list[ClusterJob]:
        """Return all programs of one job id, oldest first."""
        return self._list(select(*COLUMNS).where(table.c.job_id == job_id).order_by(table.c.created_at), connection)

    def count_active(self, connection: Connection | None = None) -> int:
        with reading(self._database, connection) as reader:
            return int(reader.execute(select(func.count()).select_from(table).where(NOT_ENDED)).scalar_one())

    def _list(self, query: Select[Any], connection: Connection | None) -> list[ClusterJob]:
        with reading(self._database, connection) as reader:
            return [_read(row) for row in reader.execute(query).mappings()]


def _key(job: JobKey) -> Any:
    return and_(table.c.job_id == job.id, table.c.program == job.program)


def _read(row: Mapping[Any, Any]) -> ClusterJob:
    values = {str(name): value for name, value in row.items()}
    reason = values["reason"]
    typed = {
        "program": Program(values["program"]),
        "phase": Phase(values["phase"]),
        "reason": None if reason is None else ExitReason(reason),
    }
    return ClusterJob(**{**values, **typed})
