"""The feature store (specification row C5): features of a dataset version, as its files have them, by key or of raw rows.

A version's files appear with it and go with it, all at once, and never change: nothing is materialized a second time, and no
half of it is ever answered.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from sqlalchemy import select

from recipes.records import key_index
from recipes.records.cleaning import Unclean
from recipes.records.features import COLUMN, INDEX, ONLINE, STATE, Features, FeatureState, serve
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.errors import invalid, not_found
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.tables import dataset_versions

KNOWN = 64
"""Versions whose logic a process remembers."""
BEGIN = "prepare one with a section `features:` (`hanzo-ml dataset prepare`)"


class FeatureTable:
    """The features of one version. Reading raises FileNotFoundError where its files are gone."""

    def __init__(self, store: Store, place: str) -> None:
        artifact = store.find(place)
        if artifact is None:
            raise BrokenArtifact(f"the manifest of {place} is missing")
        files = {file.path: file for file in store.manifest(artifact).files}
        raw = store.get_bytes(f"{place}/{STATE}")
        if hashlib.sha256(raw).hexdigest() != files[STATE].sha256:
            raise BrokenArtifact(f"{place}/{STATE} is not what was recorded")
        self.state = FeatureState.model_validate_json(raw)
        self._store, self._place = store, place
        self._index_bytes = files[INDEX].size if INDEX in files else 0

    def of_key(self, key: str) -> Features | None:
        """None where no record has the key."""
        lines, index = partial(self._read, ONLINE), partial(self._read, INDEX)
        found = key_index.find(key, lines, index, self._index_bytes)
        return None if found is None else dict(found[COLUMN])

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[Features]:
        """Raises 400 for a row that the preparation would have rejected, with its place."""
        made = []
        for number, row in enumerate(rows, start=1):
            try:
                made.append(serve(self.state, row, self.of_key))
            except Unclean as problem:
                raise invalid(f"row {number}: {problem}") from None
        return made

    def _read(self, name: str, begin: int, end: int) -> bytes:
        return b"".join(self._store.open(f"{self._place}/{name}").chunks(begin, end))


@lru_cache(maxsize=KNOWN)
def table_of(store: Store, place: str, version_id: str) -> FeatureTable:
    """By the version's id: once a store was emptied, another version may lie at that place."""
    return FeatureTable(store, place)


def features_of(store: Store, version: DatasetVersion) -> FeatureTable:
    return table_of(store, f"{version.storage_path}features", version.id)


def version_with_features(database: Database, name: str, organization: str, number: int | None) -> DatasetVersion:
    """A version of that name, the newest that has features where no number says which. Raises 404."""
    if number is not None:
        version = Datasets(database).read(f"{name}@{number}", organization)
        if not has_features(version):
            raise not_found(f"dataset {version.reference} has no features: ask for another version, or {BEGIN}")
        return version
    table = dataset_versions
    declared = table.c.lineage[("transform", "features")].as_string().is_not(None)
    query = select(table.c.version).where(table.c.organization == organization, table.c.name == name, declared)
    with database.read() as connection:
        newest = connection.execute(query.order_by(table.c.version.desc()).limit(1)).scalar()
        if newest is None:
            raise not_found(f"no version of a dataset '{name[:100]}' has features: {BEGIN}")
        return Datasets(database).resolve(f"{name}@{newest}", organization, connection)


def has_features(version: DatasetVersion) -> bool:
    transform = version.lineage["transform"]
    return isinstance(transform, Mapping) and "features" in transform


def looked_up(store: Store, version: DatasetVersion, key: str) -> Features:
    """Raises 404 for a key that no record has, 400 where the version has none at all."""
    table = features_of(store, version)
    if table.state.features.key is None:
        raise invalid(f"the features of dataset {version.reference} have no `key`: POST rows to .../transform instead")
    found = table.of_key(key)
    if found is None:
        column = table.state.features.key
        raise not_found(f"no record of dataset {version.reference} has this key in '{column}'")
    return found
