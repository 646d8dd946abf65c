"""Find what models in use were trained on.

These are the baselines for a dataset's drift and leak checks.
"""

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
"""The digests of a version's records and of its training split; null if it has not been split."""
MAX_DIGESTS_PER_QUERY = 500
"""Maximum number of digests in one query: both databases limit the parameters of a statement."""


@dataclass(frozen=True)
class ModelAncestry:
    """A model version in use, with the digests of its ancestors.

    `trained_on` has those of its training data only.
    """

    reference: str
    stage: str
    updated_at: int
    digests: frozenset[str]
    trained_on: frozenset[str]


class Ancestry:
    """Queries the lineage of one dataset version, within one transaction."""

    def __init__(self, connection: Connection, database: Database, version: DatasetVersion) -> None:
        self._connection = connection
        self._datasets = Datasets(database)
        self._version = version
        self._models = models_in_use(connection, version.organization)

    def baseline(self) -> tuple[str, Artifact] | None:
        """Return NAME@VERSION and statistics of the version that is the baseline for drift.

        It is the version that the model in production was trained on (the newest if there are several), else the previous
        version. Versions without statistics are skipped.
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
        """Return the versions that a model was trained on.

        They are found by their splits, because the splits of a prepared version were made from its parent, not from its
        records. A version that was split again since is found by its records.
        """
        return [row for row in rows if row["split"] in model.trained_on] or [
            row for row in rows if row["digest"] in model.digests
        ]

    def training_records(self) -> dict[str, Artifact]:
        """Return the training records of all ancestors, by display name.

        Ancestors are the versions from which this one was derived, and the training data of any model in use that was made,
        in any number of steps, from a version of this dataset or of those.
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
        """Return the versions of this dataset that have statistics, oldest first."""
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
        """Return all versions from which a version was derived, without deleted ones."""
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
        """Return NAME@VERSION of a split's dataset.

        If it was split again since, it is found by its records.
        """
        columns = select(dataset_versions.c.name, dataset_versions.c.version)
        has_it = columns.where(split == TRAIN_SPLIT_DIGEST)
        cut_from = columns.join(lineage_edges, lineage_edges.c.parent == RECORDS_DIGEST).where(
            lineage_edges.c.child == split
        )
        row = self._connection.execute(has_it).first() or self._connection.execute(cut_from).first()
        return f"{row.name}@{row.version}" if row else f"split {split[:12]}"


def models_in_use(connection: Connection, organization: str) -> list[ModelAncestry]:
    """Return an organization's model versions that are, or may soon be, served."""
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
    """Return the digests of all ancestors of artifacts, and of their training data."""
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
