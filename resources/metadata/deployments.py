"""Deployments: one row for each promotion to production, and what became of it. The newest `serving` row is served."""

from dataclasses import dataclass

from sqlalchemy import Connection, select, update

from resources.metadata.outbox import emit, now_ms
from resources.metadata.tables import deployments as table
from resources.metadata.transactions import insert_into


@dataclass(frozen=True)
class Deployment:
    """A row; `promotion` is the `seq` of the event that asked for it, times are in milliseconds."""

    id: int
    name: str
    version: int
    promotion: int
    status: str
    reason: str
    url: str
    sha256: str
    created_at: int
    updated_at: int


def begin(connection: Connection, *, name: str, version: int, promotion: int, url: str, sha256: str) -> Deployment:
    """The deployment of a promotion, made when it is missing: a promotion is deployed once, however often it is seen."""
    now = now_ms()
    row = {"name": name, "version": version, "promotion": promotion, "url": url, "sha256": sha256}
    insert = insert_into(connection, table).values(**row, status="deploying", reason="", created_at=now, updated_at=now)
    # Not `rowcount`, which SQLAlchemy does not tell for every INSERT on PostgreSQL.
    if connection.execute(insert.on_conflict_do_nothing().returning(table.c.id)).first():
        emit(connection, "models", "deployment.started", name, {"name": name, "version": version})
    found = of_promotion(connection, promotion)
    assert found is not None
    return found


def of_promotion(connection: Connection, promotion: int) -> Deployment | None:
    row = connection.execute(select(table).where(table.c.promotion == promotion)).mappings().first()
    return Deployment(**row) if row else None


def serving(connection: Connection, name: str) -> Deployment | None:
    """What is served under a name."""
    query = select(table).where(table.c.name == name, table.c.status == "serving").order_by(table.c.id.desc()).limit(1)
    row = connection.execute(query).mappings().first()
    return Deployment(**row) if row else None


def newest(connection: Connection, name: str, version: int | None = None) -> Deployment | None:
    """The last deployment of a model, or of one of its versions, however it ended."""
    query = select(table).where(table.c.name == name).order_by(table.c.id.desc()).limit(1)
    if version is not None:
        query = query.where(table.c.version == version)
    row = connection.execute(query).mappings().first()
    return Deployment(**row) if row else None


def succeed(connection: Connection, deployment: Deployment) -> None:
    """This one serves from now on; the one before it is replaced."""
    now = now_ms()
    replaced = (table.c.name == deployment.name) & (table.c.status == "serving") & (table.c.id != deployment.id)
    connection.execute(update(table).where(replaced).values(status="replaced", updated_at=now))
    _end(connection, deployment, "serving", "")


def fail(connection: Connection, deployment: Deployment, reason: str) -> None:
    """This one never served; what served before it goes on."""
    _end(connection, deployment, "failed", reason)


def _end(connection: Connection, deployment: Deployment, status: str, reason: str) -> None:
    current = of_promotion(connection, deployment.promotion)
    if current is not None and current.status == status and current.reason == reason:
        return
    values = {"status": status, "reason": reason, "updated_at": now_ms()}
    connection.execute(update(table).where(table.c.id == deployment.id).values(**values))
    facts = {"name": deployment.name, "version": deployment.version, "status": status, "reason": reason}
    emit(connection, "models", f"deployment.{status}", deployment.name, facts)
