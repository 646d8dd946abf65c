"""Lineage downwards: what was made of an artifact."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, select

from recipes.storage.manifest import Artifact
from resources.metadata.tables import artifacts, lineage_edges

DATA = ("dataset", "split")
"""Kinds of artifacts that hold records."""
BATCH = 500
"""Digests of one query."""


@dataclass(frozen=True)
class Edge:
    """`child` was made of the artifact of digest `parent`, which was to it what `role` says."""

    parent: str
    role: str
    child: Artifact


def children(connection: Connection, digests: Iterable[str]) -> list[Edge]:
    """What was made of any of these, in the order in which it was recorded."""
    wanted = sorted(digests)
    columns = (artifacts.c.kind, artifacts.c.uri, artifacts.c.digest, artifacts.c.size_bytes)
    found: list[Edge] = []
    for start in range(0, len(wanted), BATCH):
        query = (
            select(lineage_edges.c.parent, lineage_edges.c.role, *columns)
            .join(artifacts, artifacts.c.digest == lineage_edges.c.child)
            .where(lineage_edges.c.parent.in_(wanted[start : start + BATCH]))
            .order_by(artifacts.c.recorded_at, artifacts.c.digest, lineage_edges.c.role)
        )
        for row in connection.execute(query):
            child = Artifact(kind=row.kind, uri=row.uri, digest=row.digest, size_bytes=row.size_bytes)
            found.append(Edge(row.parent, row.role, child))
    return found


def descend(connection: Connection, digests: Iterable[str], follow: Callable[[Artifact], bool]) -> list[Edge]:
    """All edges below these artifacts, level by level. Below what is not to be followed, nothing is looked at."""
    found: list[Edge] = []
    level = set(digests)
    seen = set(level)
    while level:
        edges = children(connection, level)
        found += edges
        level = {edge.child.digest for edge in edges if follow(edge.child)} - seen
        seen |= level
    return found
