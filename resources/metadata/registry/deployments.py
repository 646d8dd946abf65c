"""Deployments: one row per promotion to production; `find_serving` returns the one that is served.

A version that leaves production without a successor is withdrawn in two steps, because the engine is another process: its
rows become `withdrawing` in the transaction that moved it, and `withdrawn` (`mark_withdrawn`) once the engine no longer
serves them. After a crash in between, the rows show the remaining work.

Code that decides by a row's status must lock the registry first: otherwise, on PostgreSQL, a concurrent transaction could
change the status, and a withdrawal could be lost.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, and_, func, select, update

from resources.metadata.outbox import now_ms
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.registered_model_rows import emit_model, lock_registry
from resources.metadata.tables import deployments as table
from resources.metadata.tables import model_versions as versions
from resources.metadata.transactions import insert_into

LEAVING_STATUSES = ("withdrawing", "withdrawn")
LOST_EVENT = "deployment.lost"
"""Event that triggers redeployment of a version that the engine no longer serves."""


@dataclass(frozen=True)
class Deployment:
    """A row; `promotion` is the `seq` of its promotion event, times are in milliseconds."""

    id: int
    organization: str
    name: str
    version: int
    promotion: int
    status: str
    reason: str
    url: str
    sha256: str
    created_at: int
    updated_at: int

    @property
    def model(self) -> ModelKey:
        return ModelKey(self.organization, self.name)


def begin_deployment(
    connection: Connection, model: ModelKey, *, version: int, promotion: int, url: str, sha256: str
) -> Deployment:
    """Return the deployment of a promotion, created if missing (idempotent)."""
    now = now_ms()
    row = {**model.row, "version": version, "promotion": promotion, "url": url, "sha256": sha256}
    insert = insert_into(connection, table).values(**row, status="deploying", reason="", created_at=now, updated_at=now)
    # Not `rowcount`, which SQLAlchemy does not report for every INSERT on PostgreSQL.
    if connection.execute(insert.on_conflict_do_nothing().returning(table.c.id)).first():
        emit_model(connection, "deployment.started", model, {"version": version})
    found = find_by_promotion(connection, promotion)
    assert found is not None
    return found


def find_by_promotion(connection: Connection, promotion: int) -> Deployment | None:
    row = connection.execute(select(table).where(table.c.promotion == promotion)).mappings().first()
    return Deployment(**row) if row else None


def find_serving(connection: Connection, model: ModelKey) -> Deployment | None:
    """Return the deployment that is served under a name."""
    query = select(table).where(model.row_filter(table), table.c.status == "serving").order_by(table.c.id.desc()).limit(1)
    row = connection.execute(query).mappings().first()
    return Deployment(**row) if row else None


def list_in_production(connection: Connection) -> Sequence[Deployment]:
    """Return all models' served deployments whose versions are in production."""
    same = (versions.c.organization == table.c.organization, versions.c.name == table.c.name)
    joined = select(table).join(versions, and_(*same, versions.c.version == table.c.version))
    query = joined.where(table.c.status == "serving", versions.c.stage == "production").order_by(table.c.id)
    return [Deployment(**row) for row in connection.execute(query).mappings()]


def list_restoring(connection: Connection) -> Sequence[tuple[Deployment, str]]:
    """Return lost deployments that must be restored, each with its version's run id."""
    same = (versions.c.organization == table.c.organization, versions.c.name == table.c.name)
    joined = select(table, versions.c.run_id).join(versions, and_(*same, versions.c.version == table.c.version))
    wanted = (table.c.status == "deploying", table.c.reason != "", versions.c.stage == "production")
    rows = [dict(row) for row in connection.execute(joined.where(*wanted).order_by(table.c.id)).mappings()]
    return [(Deployment(**row), run_id) for row in rows for run_id in [row.pop("run_id")]]


def mark_lost(connection: Connection, deployment: Deployment, reason: str) -> bool:
    """Record that the engine lost a deployment, so that it is deployed again.

    Returns False if it need not be served any more, or was changed since the caller read it.
    """
    lock_registry(connection)
    if deployment not in [*list_in_production(connection), *(left for left, _ in list_restoring(connection))]:
        return False
    values = {"status": "deploying", "reason": reason, "updated_at": now_ms()}
    connection.execute(update(table).where(table.c.id == deployment.id).values(**values))
    version_filter = deployment.model.row_filter(versions) & (versions.c.version == deployment.version)
    run_id = connection.execute(select(versions.c.run_id).where(version_filter)).scalar_one()
    facts = {"version": deployment.version, "run_id": run_id, "promotion": deployment.promotion, "reason": reason}
    emit_model(connection, LOST_EVENT, deployment.model, facts)
    return True


def mark_restored(connection: Connection, deployment: Deployment) -> None:
    """Mark a lost deployment as serving, unless it was changed since it was read."""
    lock_registry(connection)
    if deployment in [left for left, _ in list_restoring(connection)]:
        mark_serving(connection, deployment)


def is_being_deployed(connection: Connection, run_id: str) -> bool:
    """Return whether a run's version is promoted, but neither served nor refused yet."""
    same = (versions.c.organization == table.c.organization, versions.c.name == table.c.name)
    query = select(table.c.id).join(versions, and_(*same, versions.c.version == table.c.version))
    left = query.where(versions.c.run_id == run_id, table.c.status == "deploying").limit(1)
    return connection.execute(left).first() is not None


def newest_by_version(connection: Connection, model: ModelKey, numbers: Collection[int]) -> dict[int, Deployment]:
    """Return the last deployment of each version that has one, in any status."""
    version_filter = model.row_filter(table) & table.c.version.in_(numbers)
    last = select(func.max(table.c.id)).where(version_filter).group_by(table.c.version)
    found = connection.execute(select(table).where(table.c.id.in_(last))).mappings()
    return {row["version"]: Deployment(**row) for row in found}


def mark_serving(connection: Connection, deployment: Deployment) -> bool:
    """Mark a deployment as serving and earlier ones as replaced; False if it was withdrawn.

    The earlier ones include unfinished deployments of crashed workers: the engine no longer has them.
    """
    if withdraw_if_leaving(connection, deployment):
        return False
    now = now_ms()
    served = (table.c.status == "serving") & (table.c.id != deployment.id)
    left = (table.c.status == "deploying") & (table.c.id < deployment.id)
    replaced = update(table).where(deployment.model.row_filter(table), served | left)
    connection.execute(replaced.values(status="replaced", updated_at=now))
    _end(connection, deployment, "serving", "")
    return True


def mark_failed(connection: Connection, deployment: Deployment, reason: str) -> None:
    """Mark a deployment as failed; the previous one keeps serving.

    A lost deployment is withdrawn as well: the engine would otherwise restore it at its next start.
    """
    lock_registry(connection)
    _end(connection, deployment, "failed", reason)
    if deployment.reason:
        _end(connection, deployment, "withdrawing", reason)


def withdraw_model(connection: Connection, model: ModelKey) -> list[Deployment]:
    """Withdraw a model's deployments: they are `withdrawing` until the engine drops them."""
    lock_registry(connection)
    live = select(table).where(model.row_filter(table), table.c.status.in_(("deploying", "serving"))).order_by(table.c.id)
    found = [Deployment(**row) for row in connection.execute(live).mappings()]
    for deployment in found:
        _end(connection, deployment, "withdrawing", "")
    return found


def list_withdrawing(connection: Connection, model: ModelKey | None = None) -> Sequence[Deployment]:
    """Return deployments that the engine must still remove, oldest first."""
    query = select(table).where(table.c.status == "withdrawing").order_by(table.c.id)
    if model is not None:
        query = query.where(model.row_filter(table))
    return [Deployment(**row) for row in connection.execute(query).mappings()]


def mark_withdrawn(connection: Connection, deployment: Deployment) -> None:
    """Record that the engine no longer serves a deployment."""
    lock_registry(connection)
    current = find_by_promotion(connection, deployment.promotion)
    if current is not None and current.status == "withdrawing":
        _end(connection, deployment, "withdrawn", current.reason)


def withdraw_if_leaving(connection: Connection, deployment: Deployment) -> bool:
    """Return whether a deployment was withdrawn while in progress, and withdraw it once more.

    The engine may have loaded it meanwhile.
    """
    lock_registry(connection)
    current = find_by_promotion(connection, deployment.promotion)
    if current is None or current.status not in LEAVING_STATUSES:
        return False
    _end(connection, deployment, "withdrawing", "")
    return True


def mark_overtaken(connection: Connection, deployment: Deployment) -> None:
    """Mark a deployment as replaced by a later promotion, so that it is not retried."""
    if withdraw_if_leaving(connection, deployment):
        return
    current = find_by_promotion(connection, deployment.promotion)
    if current is not None and current.status == "deploying":
        _end(connection, deployment, "replaced", "")


def _end(connection: Connection, deployment: Deployment, status: str, reason: str) -> None:
    current = find_by_promotion(connection, deployment.promotion)
    if current is not None and current.status == status and current.reason == reason:
        return
    values = {"status": status, "reason": reason, "updated_at": now_ms()}
    connection.execute(update(table).where(table.c.id == deployment.id).values(**values))
    facts = {"version": deployment.version, "status": status, "reason": reason}
    emit_model(connection, f"deployment.{status}", deployment.model, facts)
