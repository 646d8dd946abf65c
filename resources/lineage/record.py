"""Writing lineage: an artifact and the edges of its manifest, in the transaction of the change that made it."""

from sqlalchemy import Connection, select

from recipes.storage.manifest import Artifact, Manifest
from resources.metadata.outbox import now_ms
from resources.metadata.tables import artifacts, lineage_edges
from resources.metadata.transactions import insert_into


def record(connection: Connection, artifact: Artifact, manifest: Manifest) -> None:
    """Remember an artifact and what it was made from. Recording it again changes nothing."""
    row = {"digest": artifact.digest, "kind": artifact.kind, "uri": artifact.uri, "size_bytes": artifact.size_bytes}
    insert = insert_into(connection, artifacts).values(**row, recorded_at=now_ms())
    connection.execute(insert.on_conflict_do_nothing())
    for role, parent in manifest.inputs.items():
        edge = insert_into(connection, lineage_edges).values(child=artifact.digest, role=role, parent=parent)
        connection.execute(edge.on_conflict_do_nothing())


def find(connection: Connection, digest: str) -> Artifact | None:
    """The recorded artifact of a digest."""
    columns = (artifacts.c.kind, artifacts.c.uri, artifacts.c.digest, artifacts.c.size_bytes)
    row = connection.execute(select(*columns).where(artifacts.c.digest == digest)).mappings().first()
    return Artifact(**row) if row else None


def parents(connection: Connection, digest: str) -> dict[str, str]:
    """Role -> digest of what an artifact was made from, as the database has it."""
    query = select(lineage_edges.c.role, lineage_edges.c.parent).where(lineage_edges.c.child == digest)
    return {row.role: row.parent for row in connection.execute(query)}
