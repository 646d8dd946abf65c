"""Deployments: one row for each promotion to production, and what became of it. The newest `find_serving` row is served.

A version that leaves production without a successor is withdrawn in two steps, because the engine is another process: its
rows are `list_withdrawing` in the transaction that moved it, and `mark_withdrawn` once the engine was seen to serve them no
more. Whatever dies in between, the row says what is still to be done.

Whoever decides by a row's status takes the lock of the registry first: on PostgreSQL another transaction could else change
it in between, and a withdrawal be lost.
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
"""The event by which what the engine does not serve any more is deployed again."""


@dataclass(frozen=True)
class Deployment:
    """A row; `promotion` is the `seq` of the event that asked for it, times are in milliseconds."""

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
    """The deployment of a promotion, made when it is missing: a promotion is deployed once, however often it is seen."""
    now = now_ms()
    row = {**model.row, "version": version, "promotion": promotion, "url": url, "sha256": sha256}
    insert = insert_into(connection, table).values(**row, status="deploying", reason="", created_at=now, updated_at=now)
    # Not `rowcount`, which SQLAlchemy does not tell for every INSERT on PostgreSQL.
    if connection.execute(insert.on_conflict_do_nothing().returning(table.c.id)).first():
        emit_model(connection, "deployment.started", model, {"version": version})
    found = find_by_promotion(connection, promotion)
    assert found is not None
    return found


def find_by_promotion(connection: Connection, promotion: int) -> Deployment | None:
    row = connection.execute(select(table).where(table.c.promotion == promotion)).mappings().first()
    return Deployment(**row) if row else None


def find_serving(connection: Connection, model: ModelKey) -> Deployment | None:
    """What is served under a name."""
    query = select(table).where(model.row_filter(table), table.c.status == "serving").order_by(table.c.id.desc()).limit(1)
    row = connection.execute(query).mappings().first()
    return Deployment(**row) if row else None


def list_in_production(connection: Connection) -> Sequence[Deployment]:
    """What is served and is to be: of all models, the deployments of the versions that are in production."""
    same = (versions.c.organization == table.c.organization, versions.c.name == table.c.name)
    joined = select(table).join(versions, and_(*same, versions.c.version == table.c.version))
    query = joined.where(table.c.status == "serving", versions.c.stage == "production").order_by(table.c.id)
    return [Deployment(**row) for row in connection.execute(query).mappings()]


def list_restoring(connection: Connection) -> Sequence[tuple[Deployment, str]]:
    """What was lost and is to serve again, each with the run that its version is of."""
    same = (versions.c.organization == table.c.organization, versions.c.name == table.c.name)
    joined = select(table, versions.c.run_id).join(versions, and_(*same, versions.c.version == table.c.version))
    wanted = (table.c.status == "deploying", table.c.reason != "", versions.c.stage == "production")
    rows = [dict(row) for row in connection.execute(joined.where(*wanted).order_by(table.c.id)).mappings()]
    return [(Deployment(**row), run_id) for row in rows for run_id in [row.pop("run_id")]]


def mark_lost(connection: Connection, deployment: Deployment, reason: str) -> bool:
    """The engine does not serve this one, for that reason: it is deployed again. False where it is not to be any more, or is
    not as it was when it was looked at.
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
    """What was lost and given up is served all the same, unless it was decided otherwise since it was looked at."""
    lock_registry(connection)
    if deployment in [left for left, _ in list_restoring(connection)]:
        mark_serving(connection, deployment)


def is_being_deployed(connection: Connection, run_id: str) -> bool:
    """Whether the version that a run became is promoted, and neither served nor refused yet."""
    same = (versions.c.organization == table.c.organization, versions.c.name == table.c.name)
    query = select(table.c.id).join(versions, and_(*same, versions.c.version == table.c.version))
    left = query.where(versions.c.run_id == run_id, table.c.status == "deploying").limit(1)
    return connection.execute(left).first() is not None


def newest_by_version(connection: Connection, model: ModelKey, numbers: Collection[int]) -> dict[int, Deployment]:
    """The last deployment of each of a model's versions that has one, however it ended."""
    version_filter = model.row_filter(table) & table.c.version.in_(numbers)
    last = select(func.max(table.c.id)).where(version_filter).group_by(table.c.version)
    found = connection.execute(select(table).where(table.c.id.in_(last))).mappings()
    return {row["version"]: Deployment(**row) for row in found}


def mark_serving(connection: Connection, deployment: Deployment) -> bool:
    """This one serves from now on, and those before it are replaced; False where it was withdrawn meanwhile.

    One that a dead worker left half-way is among those: of another deployment the engine has nothing any more.
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
    """This one does not serve; what served before it goes on.

    One that was lost did serve: the engine wants it still, and would have it back at its next start.
    """
    lock_registry(connection)
    _end(connection, deployment, "failed", reason)
    if deployment.reason:
        _end(connection, deployment, "withdrawing", reason)


def withdraw_model(connection: Connection, model: ModelKey) -> list[Deployment]:
    """Nothing of a model is to be served any more: whoever follows the withdrawing rows tells the engine."""
    lock_registry(connection)
    live = select(table).where(model.row_filter(table), table.c.status.in_(("deploying", "serving"))).order_by(table.c.id)
    found = [Deployment(**row) for row in connection.execute(live).mappings()]
    for deployment in found:
        _end(connection, deployment, "withdrawing", "")
    return found


def list_withdrawing(connection: Connection, model: ModelKey | None = None) -> Sequence[Deployment]:
    """What the engine is still to be told of, oldest first."""
    query = select(table).where(table.c.status == "withdrawing").order_by(table.c.id)
    if model is not None:
        query = query.where(model.row_filter(table))
    return [Deployment(**row) for row in connection.execute(query).mappings()]


def mark_withdrawn(connection: Connection, deployment: Deployment) -> None:
    """The engine serves this one no more."""
    lock_registry(connection)
    current = find_by_promotion(connection, deployment.promotion)
    if current is not None and current.status == "withdrawing":
        _end(connection, deployment, "withdrawn", current.reason)


def withdraw_if_leaving(connection: Connection, deployment: Deployment) -> bool:
    """Whether a deployment was withdrawn while it was being made. The engine may have it all the same: it is told again."""
    lock_registry(connection)
    current = find_by_promotion(connection, deployment.promotion)
    if current is None or current.status not in LEAVING_STATUSES:
        return False
    _end(connection, deployment, "withdrawing", "")
    return True


def mark_overtaken(connection: Connection, deployment: Deployment) -> None:
    """Another version was promoted before this one was deployed: it is not to be tried again."""
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
