"""Which models saw a record: every dataset version, split, run, model version and deployment that it reached (row B8)."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from recipes.record_index import fingerprint_of
from recipes.records.fingerprint import canonical_line
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.lineage.data_reach import reach
from resources.lineage.record_finder import RecordFinder
from resources.lineage.trace_tree import TraceNode, Tree, nodes_below
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets

PREVIEW = 300
"""Characters of a record that are shown."""
COUNTED = ("dataset version", "split", "run", "model version", "deployment")


class Trace(BaseModel):
    """Everything that a record reached. `record` is the hash that it is known by, `totals` counts what it reached by kind.

    `live` names the model versions that are served now and learned from it.
    """

    record: str
    preview: str
    found: bool
    totals: dict[str, int]
    live: list[str]
    reached: list[TraceNode]


class Tracer:
    """Traces records through all that an organization has."""

    def __init__(self, database: Database, store: Store, organization: str) -> None:
        self.store = store
        self._database = database
        self._organization = organization
        self._versions = sorted(Datasets(database).list(organization), key=lambda version: version.created_at)
        self._finder = RecordFinder(database, store, self.versions)

    @property
    def versions(self) -> list[Artifact]:
        """The records of all versions, oldest first."""
        return [version.artifact for version in self._versions]

    def trace(self, row: Mapping[str, Any]) -> Trace:
        """Where a record, in any order of its keys, went."""
        line = canonical_line(row)
        wanted = fingerprint_of(line)
        hits = self._finder.find(wanted)
        names = {version.name for version in self._versions if version.artifact.digest in hits}
        reached = reach(self._database, self.store, self._organization, set(hits), names)
        with self._database.read() as connection:
            nodes = Tree(connection, self._versions, hits, reached).grow()
        below = {(node.kind, node.name): node for node in nodes_below(nodes) if not node.seen_above}
        served = {
            str(node.facts["model"])
            for node in below.values()
            if node.kind == "deployment" and node.facts["live"] and node.facts["learned"]
        }
        return Trace(
            record=f"{wanted.record:016x}",
            preview=line.decode()[:PREVIEW],
            found=bool(nodes),
            totals={kind: sum(found == kind for found, _ in below) for kind in COUNTED},
            live=sorted(served),
            reached=nodes,
        )
