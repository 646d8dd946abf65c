"""The feature store: features of a dataset version, by key or computed from raw rows.

A version's feature files are created and deleted with it and never change: nothing is materialized twice, and no answer is
partial.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from sqlalchemy import select

from recipes.records import key_index
from recipes.records.features import (
    FEATURES_COLUMN,
    ONLINE_FILE,
    ONLINE_INDEX_FILE,
    STATE_FILE,
    Features,
    FeatureState,
    UncleanRecord,
    serve_features,
)
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.errors import invalid, not_found
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.tables import dataset_versions

MAX_CACHED_TABLES = 64
"""Number of versions whose feature tables a process caches."""
PREPARE_HINT = "prepare one with a section `features:` (`hanzo-ml dataset prepare`)"


class FeatureTable:
    """The features of one version. Reading raises FileNotFoundError if its files are gone."""

    def __init__(self, store: Store, folder_uri: str) -> None:
        artifact = store.find(folder_uri)
        if artifact is None:
            raise BrokenArtifact(f"the manifest of {folder_uri} is missing")
        files = {file.path: file for file in store.manifest(artifact).files}
        raw = store.get_bytes(f"{folder_uri}/{STATE_FILE}")
        if hashlib.sha256(raw).hexdigest() != files[STATE_FILE].sha256:
            raise BrokenArtifact(f"{folder_uri}/{STATE_FILE} is not what was recorded")
        self.state = FeatureState.model_validate_json(raw)
        self._store, self._folder_uri = store, folder_uri
        self._index_bytes = files[ONLINE_INDEX_FILE].size if ONLINE_INDEX_FILE in files else 0

    def find_by_key(self, key: str) -> Features | None:
        """Return the features of the record with a key, or None."""
        lines, index = partial(self._read, ONLINE_FILE), partial(self._read, ONLINE_INDEX_FILE)
        found = key_index.find_by_key(key, lines, index, self._index_bytes)
        return None if found is None else dict(found[FEATURES_COLUMN])

    def transform_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[Features]:
        """Compute the features of rows.

        Raises:
            HanzoError: 400 for a row that preparation would reject, with its number.
        """
        made = []
        for number, row in enumerate(rows, start=1):
            try:
                made.append(serve_features(self.state, row, self.find_by_key))
            except UncleanRecord as problem:
                raise invalid(f"row {number}: {problem}") from None
        return made

    def _read(self, name: str, begin: int, end: int) -> bytes:
        return b"".join(self._store.open(f"{self._folder_uri}/{name}").chunks(begin, end))


@lru_cache(maxsize=MAX_CACHED_TABLES)
def cached_feature_table(store: Store, folder_uri: str, version_id: str) -> FeatureTable:
    """Open a feature table.

    `version_id` is part of the cache key, since another version may later use the same folder.
    """
    return FeatureTable(store, folder_uri)


def open_feature_table(store: Store, version: DatasetVersion) -> FeatureTable:
    return cached_feature_table(store, f"{version.storage_path}features", version.id)


def find_version_with_features(database: Database, name: str, organization: str, number: int | None) -> DatasetVersion:
    """Return the version with this name and number, or without number the newest with features.

    Raises:
        HanzoError: 404 if there is none, or it has no features.
    """
    if number is not None:
        version = Datasets(database).read(f"{name}@{number}", organization)
        if not has_features(version):
            raise not_found(f"dataset {version.reference} has no features: ask for another version, or {PREPARE_HINT}")
        return version
    table = dataset_versions
    declared = table.c.lineage[("transform", "features")].as_string().is_not(None)
    query = select(table.c.version).where(table.c.organization == organization, table.c.name == name, declared)
    with database.read() as connection:
        newest = connection.execute(query.order_by(table.c.version.desc()).limit(1)).scalar()
        if newest is None:
            raise not_found(f"no version of a dataset '{name[:100]}' has features: {PREPARE_HINT}")
        return Datasets(database).resolve(f"{name}@{newest}", organization, connection)


def has_features(version: DatasetVersion) -> bool:
    transform = version.lineage["transform"]
    return isinstance(transform, Mapping) and "features" in transform


def find_features(store: Store, version: DatasetVersion, key: str) -> Features:
    """Return the features of a key.

    Raises:
        HanzoError: 404 if no record has the key, 400 if the version has no key.
    """
    table = open_feature_table(store, version)
    if table.state.features.key is None:
        raise invalid(f"the features of dataset {version.reference} have no `key`: POST rows to .../transform instead")
    found = table.find_by_key(key)
    if found is None:
        column = table.state.features.key
        raise not_found(f"no record of dataset {version.reference} has this key in '{column}'")
    return found
