"""A dataset version as JSON, and how a request names one."""

from collections.abc import Sequence
from typing import Any

from api.auth.permissions import Caller
from resources.errors import not_found
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.validations import Validations


def versions_json(database: Database, versions: Sequence[DatasetVersion]) -> list[dict[str, Any]]:
    """Versions and, as `checks`, how each stands with its checks: what is blocked is neither split nor trained on."""
    with database.read() as connection:
        standings = Validations(database).standings([version.id for version in versions], connection)
    return [
        vars(version) | {"artifact": version.artifact.model_dump(), "checks": vars(standings[version.id])}
        for version in versions
    ]


def version_json(database: Database, version: DatasetVersion) -> dict[str, Any]:
    return versions_json(database, [version])[0]


def find(database: Database, dataset_id: str) -> DatasetVersion:
    """The version of a path's id, of which the guard knows whose it is."""
    with database.read() as connection:
        return Datasets(database).get(dataset_id, connection)


def find_own(database: Database, identifier: str, caller: Caller) -> DatasetVersion:
    """The version that another parameter names, by its id or as NAME@VERSION, if it is the caller's organization's."""
    if "@" in identifier:
        return Datasets(database).read(identifier, caller.organization)
    version = find(database, identifier)
    if version.organization != caller.organization:
        raise not_found(f"no dataset version has the id '{identifier}': see `hanzo-ml dataset list`")
    return version
