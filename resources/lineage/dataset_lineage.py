"""A dataset version among what it was made of and what was made of it (rows B2, B8, B9).

"What data was this model trained on" is asked of the model (`prove`); here it is asked from the data's side.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, select

from recipes.storage import uris
from recipes.storage.manifest import Artifact
from resources.datasets.prepared_versions import SPLITS
from resources.lineage.edges import find_artifact, parent_digests
from resources.metadata.datasets import DatasetVersion
from resources.metadata.tables import artifacts, dataset_versions, lineage_edges


@dataclass(frozen=True)
class LinkedArtifact:
    """Something in the chain: `name` says what it is in words that a user knows."""

    name: str
    kind: str
    uri: str
    digest: str


@dataclass(frozen=True)
class Lineage:
    """Both ways. `made_from` begins with the nearest; `find_children` are versions, `made_into` all else that came of it, in
    which a run stands once.

    `origins` are addresses at which a version's raw files could be had, of those that were made for it.
    """

    parents: list[str]
    transform: object
    origins: list[str]
    made_from: list[LinkedArtifact]
    children: list[str]
    made_into: list[LinkedArtifact]


def read_lineage(connection: Connection, version: DatasetVersion) -> Lineage:
    found = find_children(connection, version)
    return Lineage(
        parents=list(version.lineage["parent_datasets"]),
        transform=version.lineage["transform"],
        origins=list(version.lineage.get("origins", ())),
        made_from=[link_artifact(connection, artifact) for artifact in ancestors(connection, version.artifact)],
        children=[each.name.removeprefix("dataset ") for each in found if each.kind == "dataset"],
        made_into=deduplicate_runs(each for each in found if each.kind != "dataset"),
    )


def deduplicate_runs(found: Iterable[LinkedArtifact]) -> list[LinkedArtifact]:
    """Each name once: a run's adapter and its evaluations are told by their run's name, which stood there three times. The
    record of the run goes before them.
    """
    once: dict[str, LinkedArtifact] = {}
    for each in found:
        if each.name not in once or each.kind == "run":
            once[each.name] = each
    return list(once.values())


def ancestors(connection: Connection, artifact: Artifact) -> list[Artifact]:
    """Everything that an artifact was made from, the nearest first."""
    seen: dict[str, Artifact] = {}
    level = [artifact.digest]
    while level:
        above = [parent for digest in level for parent in parent_digests(connection, digest).values() if parent not in seen]
        found = [each for digest in dict.fromkeys(above) if (each := find_artifact(connection, digest))]
        seen.update((each.digest, each) for each in found)
        level = [each.digest for each in found]
    return list(seen.values())


def version_digests(version: DatasetVersion) -> list[str]:
    """Of its records and of its splits: those of a prepared version were made of that one's parent, not of its records."""
    return [version.artifact.digest, *(version.split(split).digest for split in version.splits)]


def find_children(connection: Connection, version: DatasetVersion, but: Collection[str] = ()) -> list[LinkedArtifact]:
    """Everything that was made of a version, the nearest first, and the versions that name it as their parent.

    Args:
        but: digests of its records and splits of which what was made is not asked.
    """
    seen: dict[str, Artifact] = {}
    level = [digest for digest in version_digests(version) if digest not in but]
    while level:
        query = select(lineage_edges.c.child).where(lineage_edges.c.parent.in_(level)).order_by(lineage_edges.c.child)
        below = [child for child in connection.execute(query).scalars() if child not in seen]
        found = [each for digest in dict.fromkeys(below) if (each := find_artifact(connection, digest))]
        seen.update((each.digest, each) for each in found)
        level = [each.digest for each in found]
    named = [link_artifact(connection, artifact) for artifact in seen.values()]
    return list(dict.fromkeys([*named, *find_declared_children(connection, version)]))


def find_declared_children(connection: Connection, version: DatasetVersion) -> list[LinkedArtifact]:
    columns = (dataset_versions.c.name, dataset_versions.c.version, dataset_versions.c.lineage, dataset_versions.c.artifact)
    query = select(*columns).where(dataset_versions.c.organization == version.organization)
    return [
        LinkedArtifact(f"dataset {row.name}@{row.version}", "dataset", row.artifact["uri"], row.artifact["digest"])
        for row in connection.execute(query.order_by(dataset_versions.c.name, dataset_versions.c.version))
        if version.reference in row.lineage["parent_datasets"]
    ]


def own_artifacts(connection: Connection, version: DatasetVersion) -> list[Artifact]:
    """What belongs to a version and goes with it: source files, records and splits, which all lie in its folder."""
    below = artifacts.c.uri.startswith(version.storage_path, autoescape=True)
    query = select(artifacts.c.digest).where(below)
    return [each for digest in connection.execute(query).scalars() if (each := find_artifact(connection, digest))]


def shared_artifact_uris(connection: Connection, version: DatasetVersion, digests: Collection[str]) -> dict[str, str]:
    """Digest -> URI of these artifacts where another version names them as its records or as one of its splits."""
    pointers = (dataset_versions.c.artifact, *(dataset_versions.c.splits[split]["artifact"] for split in SPLITS))
    found: dict[str, str] = {}
    for pointer in pointers:
        digest = pointer["digest"].as_string()
        query = select(digest.label("digest"), pointer["uri"].as_string().label("uri")).where(
            dataset_versions.c.id != version.id, digest.in_(digests)
        )
        found.update((row.digest, row.uri) for row in connection.execute(query))
    return found


def is_own_part(version: DatasetVersion, child: LinkedArtifact) -> bool:
    """Whether something is a part of the version itself, such as a split. What was prepared of it is another version,
    though it may lie in the folder of this one."""
    return child.kind != "dataset" and child.uri.startswith(version.storage_path)


def link_artifact(connection: Connection, artifact: Artifact) -> LinkedArtifact:
    return LinkedArtifact(describe_artifact(connection, artifact), artifact.kind, artifact.uri, artifact.digest)


def describe_artifact(connection: Connection, artifact: Artifact) -> str:
    if artifact.kind == "dataset":
        folder = artifact.uri.rpartition("/")[0].rpartition("/")[0]
        columns = (dataset_versions.c.name, dataset_versions.c.version)
        query = select(*columns).where(dataset_versions.c.storage_path == f"{folder}/")
        row = connection.execute(query).first()
        return f"dataset {row.name}@{row.version}" if row else f"dataset at {artifact.uri}"
    if run_id := uris.parse_run_id(artifact.uri):
        return f"run {run_id}"
    return f"{artifact.kind} at {artifact.uri}"
