"""Record artifacts and lineage edges, and follow them up and down."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, select

from recipes.storage.manifest import Artifact, Manifest
from resources.metadata.outbox import now_ms
from resources.metadata.tables import artifacts, lineage_edges
from resources.metadata.transactions import insert_into

# Lineage is written within the transaction of the change that creates the artifact: the artifact and its manifest's edges.


def record_artifact(connection: Connection, artifact: Artifact, manifest: Manifest) -> None:
    """Record an artifact and what it was made from. Recording it again changes nothing."""
    row = {"digest": artifact.digest, "kind": artifact.kind, "uri": artifact.uri, "size_bytes": artifact.size_bytes}
    insert = insert_into(connection, artifacts).values(**row, recorded_at=now_ms())
    connection.execute(insert.on_conflict_do_nothing())
    for role, parent in manifest.inputs.items():
        edge = insert_into(connection, lineage_edges).values(child=artifact.digest, role=role, parent=parent)
        connection.execute(edge.on_conflict_do_nothing())


def find_artifact(connection: Connection, digest: str) -> Artifact | None:
    """Return the recorded artifact with a digest."""
    columns = (artifacts.c.kind, artifacts.c.uri, artifacts.c.digest, artifacts.c.size_bytes)
    row = connection.execute(select(*columns).where(artifacts.c.digest == digest)).mappings().first()
    return Artifact(**row) if row else None


def parent_digests(connection: Connection, digest: str) -> dict[str, str]:
    """Return the recorded inputs of an artifact: the digest of each role."""
    query = select(lineage_edges.c.role, lineage_edges.c.parent).where(lineage_edges.c.child == digest)
    return {row.role: row.parent for row in connection.execute(query)}


DATA_KINDS = ("dataset", "split")
"""Kinds of artifacts that contain records."""
QUERY_BATCH = 500
"""Number of digests in one query."""


@dataclass(frozen=True)
class Edge:
    """`child` was made from the artifact with digest `parent`, in the role `role`."""

    parent: str
    role: str
    child: Artifact


def child_edges(connection: Connection, digests: Iterable[str]) -> list[Edge]:
    """Return the edges to everything made from any of these, in recorded order."""
    wanted = sorted(digests)
    columns = (artifacts.c.kind, artifacts.c.uri, artifacts.c.digest, artifacts.c.size_bytes)
    found: list[Edge] = []
    for start in range(0, len(wanted), QUERY_BATCH):
        query = (
            select(lineage_edges.c.parent, lineage_edges.c.role, *columns)
            .join(artifacts, artifacts.c.digest == lineage_edges.c.child)
            .where(lineage_edges.c.parent.in_(wanted[start : start + QUERY_BATCH]))
            .order_by(artifacts.c.recorded_at, artifacts.c.digest, lineage_edges.c.role)
        )
        for row in connection.execute(query):
            child = Artifact(kind=row.kind, uri=row.uri, digest=row.digest, size_bytes=row.size_bytes)
            found.append(Edge(row.parent, row.role, child))
    return found


def descendant_edges(connection: Connection, digests: Iterable[str], follow: Callable[[Artifact], bool]) -> list[Edge]:
    """Return all edges below these artifacts, level by level.

    Artifacts that `follow` excludes are not followed.
    """
    found: list[Edge] = []
    level = set(digests)
    seen = set(level)
    while level:
        edges = child_edges(connection, level)
        found += edges
        level = {edge.child.digest for edge in edges if follow(edge.child)} - seen
        seen |= level
    return found
