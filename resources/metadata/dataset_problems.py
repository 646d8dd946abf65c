"""Record why dataset versions could not be checked or split, for waiting clients."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, delete, select

from resources.metadata.datasets import DatasetVersion
from resources.metadata.outbox import emit, now_ms
from resources.metadata.tables import dataset_problems as table
from resources.metadata.transactions import insert_into

FAILED_EVENT = "dataset.failed"


@dataclass(frozen=True)
class DatasetProblem:
    """The problem in one sentence, and when it was recorded (ms since 1970)."""

    problem: str
    told_at: int


def record_problem(connection: Connection, version: DatasetVersion, problem: str) -> None:
    """Record a problem, replacing an earlier one, and emit its event."""
    values = {"problem": problem, "told_at": now_ms()}
    row = insert_into(connection, table).values(dataset_id=version.id, **values)
    connection.execute(row.on_conflict_do_update(index_elements=["dataset_id"], set_=values))
    facts = {"dataset_id": version.id, "name": version.name, "version": version.version, "problem": problem}
    emit(connection, "datasets", FAILED_EVENT, version.name, facts)


def clear_problem(connection: Connection, version: DatasetVersion) -> None:
    connection.execute(delete(table).where(table.c.dataset_id == version.id))


def find_problems(connection: Connection, dataset_ids: Collection[str]) -> Mapping[str, DatasetProblem]:
    """Return the problems of the versions that have one."""
    rows = connection.execute(select(table).where(table.c.dataset_id.in_(dataset_ids)))
    return {row.dataset_id: DatasetProblem(row.problem, row.told_at) for row in rows}
