"""Record artifacts and lineage edges, and follow them up and down."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, select

from recipes.storage.manifest import Artifact, Manifest
from resources.metadata.outbox import now_ms
from resources.metadata.tables import artifacts, lineage_edges
from resources.metadata.transactions import insert_into

# Writing lineage: an artifact and the edges of its manifest, in the transaction of the change that made it.


def record_artifact(connection: Connection, artifact: Artifact, manifest: Manifest) -> None:
    """Remember an artifact and what it was made from. Recording it again changes nothing."""
    row = {"digest": artifact.digest, "kind": artifact.kind, "uri": artifact.uri, "size_bytes": artifact.size_bytes}
    insert = insert_into(connection, artifacts).values(**row, recorded_at=now_ms())
    connection.execute(insert.on_conflict_do_nothing())
    for role, parent in manifest.inputs.items():
        edge = insert_into(connection, lineage_edges).values(child=artifact.digest, role=role, parent=parent)
        connection.execute(edge.on_conflict_do_nothing())


def find_artifact(connection: Connection, digest: str) -> Artifact | None:
    """The recorded artifact of a digest."""
    columns = (artifacts.c.kind, artifacts.c.uri, artifacts.c.digest, artifacts.c.size_bytes)
    row = connection.execute(select(*columns).where(artifacts.c.digest == digest)).mappings().first()
    return Artifact(**row) if row else None


def parent_digests(connection: Connection, digest: str) -> dict[str, str]:
    """Role -> digest of what an artifact was made from, as the database has it."""
    query = select(lineage_edges.c.role, lineage_edges.c.parent).where(lineage_edges.c.child == digest)
    return {row.role: row.parent for row in connection.execute(query)}


DATA_KINDS = ("dataset", "split")
"""Kinds of artifacts that hold records."""
QUERY_BATCH = 500
"""Digests of one query."""


@dataclass(frozen=True)
class Edge:
    """`child` was made of the artifact of digest `parent`, which was to it what `role` says."""

    parent: str
    role: str
    child: Artifact


def child_edges(connection: Connection, digests: Iterable[str]) -> list[Edge]:
    """What was made of any of these, in the order in which it was recorded."""
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
    """All edges below these artifacts, level by level. Below what is not to be followed, nothing is looked at."""
    found: list[Edge] = []
    level = set(digests)
    seen = set(level)
    while level:
        edges = child_edges(connection, level)
        found += edges
        level = {edge.child.digest for edge in edges if follow(edge.child)} - seen
        seen |= level
    return found
