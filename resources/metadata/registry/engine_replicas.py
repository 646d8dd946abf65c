"""Which deployments an engine's replicas must serve, and what they report.

The wanted set is derived from `deployments`: of each model, the newest that is serving and, if it is newer, the newest that
is being deployed. A row without a file was deployed by an engine that does not pull.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, select, update

from resources.metadata.outbox import now_ms
from resources.metadata.registry.deployments import Deployment
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.tables import deployment_files, deployments, engine_replicas
from resources.metadata.transactions import insert_into

LIVE_SECONDS = 20
"""A replica that has not reported for this long does not count. Replicas report every 5 s."""
FORGET_SECONDS = 3600


@dataclass(frozen=True)
class DeploymentFile:
    """A wanted deployment with its file in the object store."""

    id: int
    organization: str
    name: str
    version: int
    status: str
    sha256: str
    uri: str
    size_bytes: int
    smoke_prompts: tuple[str, ...]
    attempt: int

    @property
    def model(self) -> ModelKey:
        return ModelKey(self.organization, self.name)


@dataclass(frozen=True)
class Replica:
    """The newest report of a replica (`resources.serving.replica_messages.ReplicaReport` as JSON)."""

    id: str
    report: dict[str, Any]
    reported_at: int

    def deployment(self, deployment_id: int) -> dict[str, Any] | None:
        """Return what the replica reported about a deployment, or None."""
        return next((found for found in self.report["deployments"] if found["deployment"] == deployment_id), None)


def record_file(
    connection: Connection, deployment: Deployment, *, uri: str, size_bytes: int, smoke_prompts: Sequence[str]
) -> int:
    """Have replicas serve a deployment from a stored file. Returns the attempt's number."""
    values = {"uri": uri, "size_bytes": size_bytes, "smoke_prompts": list(smoke_prompts)}
    insert = insert_into(connection, deployment_files).values(deployment_id=deployment.id, **values, attempt=0)
    connection.execute(insert.on_conflict_do_nothing())
    mine = deployment_files.c.deployment_id == deployment.id
    changed = update(deployment_files).where(mine).values(**values, attempt=deployment_files.c.attempt + 1)
    connection.execute(changed)
    return int(connection.execute(select(deployment_files.c.attempt).where(mine)).scalar_one())


def list_wanted(connection: Connection) -> list[DeploymentFile]:
    """Return what replicas must serve, oldest first."""
    columns = [deployments.c[key] for key in ("id", "organization", "name", "version", "status", "sha256")]
    files = [deployment_files.c[key] for key in ("uri", "size_bytes", "smoke_prompts", "attempt")]
    query = (
        select(*columns, *files)
        .join(deployment_files, deployment_files.c.deployment_id == deployments.c.id)
        .where(deployments.c.status.in_(("deploying", "serving")))
        .order_by(deployments.c.id)
    )
    newest: dict[tuple[ModelKey, str], DeploymentFile] = {}
    for row in connection.execute(query).mappings():
        found = DeploymentFile(**{**row, "smoke_prompts": tuple(row["smoke_prompts"])})
        newest[found.model, found.status] = found
    wanted = [
        found
        for (model, status), found in newest.items()
        if status == "serving" or (serving := newest.get((model, "serving"))) is None or serving.id < found.id
    ]
    return sorted(wanted, key=lambda found: found.id)


def find_wanted_file(connection: Connection, sha256: str) -> DeploymentFile | None:
    """Return a file that replicas may download, or None."""
    return next((found for found in list_wanted(connection) if found.sha256 == sha256), None)


def record_report(connection: Connection, replica: str, report: dict[str, Any]) -> None:
    """Replace a replica's report, and delete reports of replicas that are long gone."""
    now = now_ms()
    insert = insert_into(connection, engine_replicas).values(id=replica, report=report, reported_at=now)
    values = {"report": report, "reported_at": now}
    connection.execute(insert.on_conflict_do_update(index_elements=["id"], set_=values))
    connection.execute(delete(engine_replicas).where(engine_replicas.c.reported_at < now - FORGET_SECONDS * 1000))


def delete_replica(connection: Connection, replica: str) -> None:
    """Delete the report of a stopping replica, so that nothing waits for it."""
    connection.execute(delete(engine_replicas).where(engine_replicas.c.id == replica))


def list_live_replicas(connection: Connection) -> list[Replica]:
    """Return replicas that have reported within `LIVE_SECONDS`, by name."""
    recent = engine_replicas.c.reported_at >= now_ms() - LIVE_SECONDS * 1000
    rows = connection.execute(select(engine_replicas).where(recent).order_by(engine_replicas.c.id)).mappings()
    return [Replica(**row) for row in rows]
