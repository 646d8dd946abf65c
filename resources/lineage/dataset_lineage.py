"""The lineage of a dataset version: its ancestors, and what was made from it.

For the question "what data was this model trained on", see `proof` and
`training_data`, which start at the model.
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
    """An artifact of the lineage; `name` describes it in the user's terms."""

    name: str
    kind: str
    uri: str
    digest: str


@dataclass(frozen=True)
class Lineage:
    """The lineage of a version in both directions.

    `made_from` begins with the nearest ancestor. `children` are versions made from it; `made_into` is everything else, in
    which each run occurs once. `origins` are addresses from which the version's raw files were downloaded.
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
    """Return each name once, and prefer the record of a run.

    A run's adapter and evaluations all have the run's name, which was once listed three times.
    """
    once: dict[str, LinkedArtifact] = {}
    for each in found:
        if each.name not in once or each.kind == "run":
            once[each.name] = each
    return list(once.values())


def ancestors(connection: Connection, artifact: Artifact) -> list[Artifact]:
    """Return everything from which an artifact was made, the nearest first."""
    seen: dict[str, Artifact] = {}
    level = [artifact.digest]
    while level:
        above = [parent for digest in level for parent in parent_digests(connection, digest).values() if parent not in seen]
        found = [each for digest in dict.fromkeys(above) if (each := find_artifact(connection, digest))]
        seen.update((each.digest, each) for each in found)
        level = [each.digest for each in found]
    return list(seen.values())


def version_digests(version: DatasetVersion) -> list[str]:
    """Return the digests of a version's records and splits.

    The splits of a prepared version were made from its parent, not from its records.
    """
    return [version.artifact.digest, *(version.split(split).digest for split in version.splits)]


def find_children(connection: Connection, version: DatasetVersion, but: Collection[str] = ()) -> list[LinkedArtifact]:
    """Return everything made from a version, nearest first.

    Includes the versions that name it as their parent.

    Args:
        but: digests of the version's records and splits whose descendants are left out.
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
    """Return the artifacts in a version's folder, which are deleted with it.

    These are source files, records and splits.
    """
    below = artifacts.c.uri.startswith(version.storage_path, autoescape=True)
    query = select(artifacts.c.digest).where(below)
    return [each for digest in connection.execute(query).scalars() if (each := find_artifact(connection, digest))]


def shared_artifact_uris(connection: Connection, version: DatasetVersion, digests: Collection[str]) -> dict[str, str]:
    """Return digest and URI of those artifacts that are also another version's records or split."""
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
    """Return whether an artifact is part of the version itself, such as a split.

    A version prepared from it is not, even if it is in its folder.
    """
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
