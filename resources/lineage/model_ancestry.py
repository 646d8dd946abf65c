"""What models in use were trained on, by the edges of lineage: the baselines of a dataset's drift, and of its leaks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from recipes.storage.manifest import Artifact
from resources.errors import HanzoError
from resources.lineage.edges import find_artifact
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.registry.model_versions import own_artifacts
from resources.metadata.tables import dataset_validations, dataset_versions, lineage_edges, model_versions

USED_STAGES = ("production", "canary", "staging")
TRAIN_ROLE = "train"
RECORDS_DIGEST = dataset_versions.c.artifact["digest"].as_string()
TRAIN_SPLIT_DIGEST = dataset_versions.c.splits[TRAIN_ROLE]["artifact"]["digest"].as_string()
"""The digest of a version's records, and of its training split; null where it has not been split."""
MAX_DIGESTS_PER_QUERY = 500
"""Digests in one query: both databases bound the parameters of a statement."""


@dataclass(frozen=True)
class ModelAncestry:
    """A model version in use: the digests of all that it was made from, and of those what it was trained on."""

    reference: str
    stage: str
    updated_at: int
    digests: frozenset[str]
    trained_on: frozenset[str]


class Ancestry:
    """Asks lineage about one dataset version, in one transaction."""

    def __init__(self, connection: Connection, database: Database, version: DatasetVersion) -> None:
        self._connection = connection
        self._datasets = Datasets(database)
        self._version = version
        self._models = models_in_use(connection, version.organization)

    def baseline(self) -> tuple[str, Artifact] | None:
        """NAME@VERSION and statistics of what drift is measured against.

        The version that the model in production was trained on, the newest where there are several; else the version before.
        A version whose statistics were never taken is passed over.
        """
        others = [row for row in self._siblings() if row["id"] != self._version.id]
        production = sorted((model for model in self._models if model.stage == "production"), key=lambda m: -m.updated_at)
        served = [row for model in production for row in self._used_by(model, list(reversed(others)))]
        earlier = [row for row in reversed(others) if row["version"] < self._version.version]
        chosen = next(iter([*served, *earlier]), None)
        if chosen is None:
            return None
        return f"{self._version.name}@{chosen['version']}", Artifact.model_validate(chosen["statistics"])

    def _used_by(self, model: ModelAncestry, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Of versions, those that a model was trained on. By their splits: of those of a prepared version its records are no
        ancestor, and the version that it was prepared of is one. Else one that was split anew since, by its records.
        """
        return [row for row in rows if row["split"] in model.trained_on] or [
            row for row in rows if row["digest"] in model.digests
        ]

    def training_records(self) -> dict[str, Artifact]:
        """What people call them -> training records of all ancestors.

        Ancestors are the versions that this one was derived from, and whatever any model in use was trained on that was
        made, in any step, from a version of this dataset or of those.
        """
        parents = self._parents(self._version, set())
        family = {self._version.name, *(parent.name for parent in parents)}
        found = {f"{parent.reference} train": parent.split(TRAIN_ROLE) for parent in parents if TRAIN_ROLE in parent.splits}
        known = {artifact.digest for artifact in found.values()}
        relatives = self._version_digests(family)
        for model in self._models:
            if not model.digests & relatives:
                continue
            for digest in sorted(model.trained_on - known):
                if (artifact := find_artifact(self._connection, digest)) is not None:
                    known.add(digest)
                    found[f"{self._split_name(digest)} train, of {model.reference}"] = artifact
        return found

    def _siblings(self) -> Sequence[Mapping[str, Any]]:
        """The versions of this dataset whose statistics are known, oldest first."""
        query = (
            select(
                dataset_versions.c.id,
                dataset_versions.c.version,
                RECORDS_DIGEST.label("digest"),
                TRAIN_SPLIT_DIGEST.label("split"),
                dataset_validations.c.statistics,
            )
            .join(dataset_validations, dataset_validations.c.dataset_id == dataset_versions.c.id)
            .where(
                dataset_versions.c.organization == self._version.organization,
                dataset_versions.c.name == self._version.name,
            )
            .order_by(dataset_versions.c.version)
        )
        return [dict(row) for row in self._connection.execute(query).mappings()]

    def _parents(self, version: DatasetVersion, seen: set[str]) -> list[DatasetVersion]:
        """All versions that a version was derived from, in any number of steps. One that was deleted since is none."""
        found = []
        for reference in version.lineage.get("parent_datasets", ()):
            if reference in seen:
                continue
            seen.add(reference)
            try:
                parent = self._datasets.resolve(reference, version.organization, self._connection)
            except HanzoError:
                continue
            found += [parent, *self._parents(parent, seen)]
        return found

    def _version_digests(self, names: Iterable[str]) -> frozenset[str]:
        query = select(RECORDS_DIGEST).where(
            dataset_versions.c.organization == self._version.organization, dataset_versions.c.name.in_(sorted(names))
        )
        return frozenset(self._connection.execute(query).scalars())

    def _split_name(self, split: str) -> str:
        """NAME@VERSION of the dataset whose split it is; of one that was split anew since, the one that it was cut from."""
        columns = select(dataset_versions.c.name, dataset_versions.c.version)
        has_it = columns.where(split == TRAIN_SPLIT_DIGEST)
        cut_from = columns.join(lineage_edges, lineage_edges.c.parent == RECORDS_DIGEST).where(
            lineage_edges.c.child == split
        )
        row = self._connection.execute(has_it).first() or self._connection.execute(cut_from).first()
        return f"{row.name}@{row.version}" if row else f"split {split[:12]}"


def models_in_use(connection: Connection, organization: str) -> list[ModelAncestry]:
    """All model versions of an organization that are, or may soon be, served, with what they were made from."""
    query = select(model_versions).where(
        model_versions.c.organization == organization, model_versions.c.stage.in_(USED_STAGES)
    )
    found = []
    for row in connection.execute(query).mappings():
        made = own_artifacts(row["artifacts"])
        digests, trained_on = ancestor_digests(connection, [artifact.digest for artifact in made.values()])
        reference = f"{row['name']}@{row['version']}"
        found.append(ModelAncestry(reference, row["stage"], row["updated_at"], digests, trained_on))
    return found


def ancestor_digests(connection: Connection, digests: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Digests of all that artifacts were made from, in any number of steps; and of those, what was trained on."""
    seen, trained_on = set(digests), set()
    edge = sorted(seen)
    while edge:
        found = set()
        for start in range(0, len(edge), MAX_DIGESTS_PER_QUERY):
            query = select(lineage_edges.c.role, lineage_edges.c.parent).where(
                lineage_edges.c.child.in_(edge[start : start + MAX_DIGESTS_PER_QUERY])
            )
            for role, parent in connection.execute(query):
                found.add(parent)
                if role == TRAIN_ROLE:
                    trained_on.add(parent)
        edge = sorted(found - seen)
        seen |= found
    return frozenset(seen), frozenset(trained_on)
