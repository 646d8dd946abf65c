"""A dataset version as JSON, how a request names one, and what is said where its files are not what they were."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from api.auth.permissions import Caller
from recipes.store import BrokenArtifact
from resources.errors import ErrorCode, HanzoError, not_found
from resources.metadata.database import Database
from resources.metadata.dataset_problems import problems_of
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.validations import Validations

log = logging.getLogger(__name__)


def versions_json(database: Database, versions: Sequence[DatasetVersion]) -> list[dict[str, Any]]:
    """Versions and, as `checks`, how each stands with its checks: what is blocked is neither split nor trained on.

    `problem` of one is why it could not be checked or split, and empty where it could, or is going to be.
    """
    identifiers = [version.id for version in versions]
    with database.read() as connection:
        standings = Validations(database).standings(identifiers, connection)
        problems = problems_of(connection, identifiers)
    told = {identifier: problem.problem for identifier, problem in problems.items()}
    return [
        vars(version)
        | {
            "artifact": version.artifact.model_dump(),
            "checks": {**vars(standings[version.id]), "problem": told.get(version.id, "")},
        }
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


@contextmanager
def reading(what: str) -> Iterator[None]:
    """What is read from the store in it may be lost or changed there, or deleted meanwhile. Raises 409 (DATA_LOSS)."""
    try:
        yield
    except (BrokenArtifact, FileNotFoundError) as error:
        log.error("%s cannot be read whole: %s", what, error)
        raise HanzoError(
            ErrorCode.DATA_LOSS,
            f"{what} cannot be read whole: the object store lost or changed a part of it, or it was deleted meanwhile. "
            "Restore the store, or create the version again from the same files: what is missing or changed is stored anew",
        ) from None
