"""Trace a record to each dataset version, run, model and deployment that it reached."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from sqlalchemy import Connection, select

from recipes.records.fingerprint import encode_canonical_line
from recipes.records.record_index import fingerprint_line
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.lineage.data_reach import Reach, Stop, StopKind, compute_reach
from resources.lineage.edges import find_artifact
from resources.lineage.record_finder import Hits, RecordFinder
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.tables import deployments, runs

MAX_RECORD_NUMBERS = 10
"""Number of records of one artifact whose numbers are listed; all are counted."""
ROLE_VERBS = {
    "train": "trained on it",
    "validation": "validated with it",
    "test": "tested with it",
    "base": "started from it",
}
"""How a run used data, by role."""
SERVED_STATUSES = ("serving", "withdrawing")
"""Statuses of deployments that answer requests now."""
ENDED_STATUSES = ("replaced", "failed", "withdrawn")


class TraceNode(BaseModel):
    """A node that the record reached, and what follows it.

    `seen_above` means that it was listed with its followers before.
    """

    kind: str
    name: str
    facts: dict[str, object] = {}
    reached: list["TraceNode"] = []
    seen_above: bool = False


def walk_nodes(nodes: Iterable[TraceNode]) -> Iterator[TraceNode]:
    """Yield these nodes and all below them."""
    for node in nodes:
        yield node
        yield from walk_nodes(node.reached)


class TraceTree:
    """Builds a tree from the records that were found (`hits`) and what they reached."""

    def __init__(self, connection: Connection, versions: Sequence[DatasetVersion], hits: Hits, reached: Reach) -> None:
        self._connection = connection
        self._hits = hits
        self._reached = reached
        self._versions = {version.artifact.digest: version for version in versions if version.artifact.digest in hits}
        self._splits = {
            split["artifact"]["digest"]: (version, name)
            for version in self._versions.values()
            for name, split in version.splits.items()
        }
        self._after = {stop: dict(following) for stop, following in reached.after.items()}
        self._learned = reached.learned()
        self._visited: set[Stop] = set()

    def build_tree(self) -> list[TraceNode]:
        """Return the first dataset versions with the record, and everything below them.

        The first are those that were not made from another version with the record.
        """
        self._attach_splits()
        data = [Stop(StopKind.DATA, digest) for digest in (*self._versions, *self._hits)]
        below = {stop for following in self._after.values() for stop in following}
        return [self._node(stop, ()) for stop in dict.fromkeys(data) if stop not in below]

    def _attach_splits(self) -> None:
        """Attach splits to their versions.

        In lineage, a prepared version's splits were made from its parent.
        """
        for digest, (version, _) in self._splits.items():
            split, owner = Stop(StopKind.DATA, digest), Stop(StopKind.DATA, version.artifact.digest)
            roles = [following.pop(split) for following in self._after.values() if split in following]
            if roles:
                self._after.setdefault(owner, {})[split] = roles[0]

    def _node(self, stop: Stop, roles: Collection[str]) -> TraceNode:
        node = self._make_node(stop)
        if stop.kind is StopKind.RUN:
            node.facts["used"] = sorted(ROLE_VERBS.get(role, role) for role in roles if role != "run") or ["made of it"]
        if stop in self._visited:
            node.seen_above = True
            return node
        self._visited.add(stop)
        node.reached += [self._node(next, roles) for next, roles in self._after.get(stop, {}).items()]
        return node

    def _make_node(self, stop: Stop) -> TraceNode:
        match stop.kind:
            case StopKind.DATA:
                return self._data(stop.name)
            case StopKind.RUN:
                return self._run(stop.name)
            case StopKind.MODEL:
                return self._model(stop.name)
            case StopKind.ARTIFACT:
                return TraceNode(kind="artifact", name=stop.name)

    def _data(self, digest: str) -> TraceNode:
        found = self._hits[digest]
        facts: dict[str, object] = {
            "records": len(found),
            "numbers": [hit.number for hit in found[:MAX_RECORD_NUMBERS]],
            "how": sorted({hit.how.value for hit in found}),
        }
        if version := self._versions.get(digest):
            facts |= {"id": version.id, "of_records": version.num_records}
            return TraceNode(kind="dataset version", name=version.reference, facts=facts)
        if known := self._splits.get(digest):
            version, split = known
            return TraceNode(kind="split", name=f"{version.reference} {split}", facts=facts)
        artifact = find_artifact(self._connection, digest)
        return TraceNode(kind="split", name=artifact.uri if artifact else digest, facts=facts)

    def _run(self, id: str) -> TraceNode:
        row = self._connection.execute(select(runs).where(runs.c.id == id)).first()
        facts: dict[str, object] = {}
        if row is not None:
            facts = {"name": row.name, "status": row.status, "started": row.start_time, "ended": row.end_time}
        return TraceNode(kind="run", name=id, facts=facts)

    def _model(self, reference: str) -> TraceNode:
        model = self._reached.models[reference]
        learned = Stop(StopKind.MODEL, reference) in self._learned
        facts: dict[str, object] = {"stage": model.stage, "status": model.status, "formats": sorted(model.artifacts)}
        query = select(deployments).where(model.model.row_filter(deployments), deployments.c.version == model.version)
        served = [
            TraceNode(
                kind="deployment",
                name=f"{row.url} {row.id}",
                facts={
                    "model": reference,
                    "status": row.status,
                    "live": row.status in SERVED_STATUSES,
                    "learned": learned,
                    "since": row.updated_at if row.status == "serving" else row.created_at,
                    "until": row.updated_at if row.status in ENDED_STATUSES else None,
                },
            )
            for row in self._connection.execute(query.order_by(deployments.c.id))
        ]
        return TraceNode(kind="model version", name=reference, facts={**facts, "learned": learned}, reached=served)


# Which models saw a record: each dataset version, split, run, model version and deployment that it reached.

PREVIEW_CHARACTERS = 300
"""Number of characters of a record in the preview."""
COUNTED_KINDS = ("dataset version", "split", "run", "model version", "deployment")


class Trace(BaseModel):
    """Everything that a record reached. `record` is its fingerprint; `totals` counts the nodes by kind.

    `live` names the model versions that are served now and were trained on it.
    """

    record: str
    preview: str
    found: bool
    totals: dict[str, int]
    live: list[str]
    reached: list[TraceNode]


class Tracer:
    """Traces records through all data of an organization."""

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
        """Trace a record; the order of its keys does not matter."""
        line = encode_canonical_line(row)
        wanted = fingerprint_line(line)
        hits = self._finder.find(wanted)
        names = {version.name for version in self._versions if version.artifact.digest in hits}
        reached = compute_reach(self._database, self.store, self._organization, set(hits), names)
        with self._database.read() as connection:
            nodes = TraceTree(connection, self._versions, hits, reached).build_tree()
        below = {(node.kind, node.name): node for node in walk_nodes(nodes) if not node.seen_above}
        served = {
            str(node.facts["model"])
            for node in below.values()
            if node.kind == "deployment" and node.facts["live"] and node.facts["learned"]
        }
        return Trace(
            record=f"{wanted.record:016x}",
            preview=line.decode()[:PREVIEW_CHARACTERS],
            found=bool(nodes),
            totals={kind: sum(found == kind for found, _ in below) for kind in COUNTED_KINDS},
            live=sorted(served),
            reached=nodes,
        )
