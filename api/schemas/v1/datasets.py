"""Dataset versions as JSON: how requests name one, and errors for damaged files."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from api.auth.permissions import Caller
from recipes.contracts.dataset_formats import FormatName
from recipes.storage.artifact_store import BrokenArtifact
from recipes.storage.manifest import Artifact
from resources.datasets.validations import Validations
from resources.errors import ErrorCode, HanzoError, not_found
from resources.metadata.database import Database
from resources.metadata.dataset_problems import find_problems
from resources.metadata.datasets import Datasets
from resources.metadata.datasets import DatasetVersion as DatasetRecord

CheckStatus = Literal["pending", "passed", "failed", "blocked"]


class Split(TypedDict):
    path: str
    num_records: int
    size_bytes: int
    artifact: Artifact


class Splits(TypedDict):
    """None while the version is not split yet."""

    train: NotRequired[Split]
    validation: NotRequired[Split]
    test: NotRequired[Split]


class DatasetOrigin(TypedDict):
    """`origins` are the source addresses of a fetched version.

    `skipped` and `unread` are as reported when the version was created.
    """

    parent_datasets: list[str]
    transform: Any
    origins: NotRequired[list[str]]
    skipped: NotRequired[list[str]]
    unread: NotRequired[dict[str, int]]


class CheckStanding(TypedDict):
    """`blocked` is why the version may not be used, else empty.

    `problem` is why it could not be checked or split, else empty.
    """

    status: CheckStatus
    blocked: str
    problem: str


class DatasetVersion(TypedDict):
    """`schema` maps a column to type names."""

    id: str
    name: str
    version: int
    organization: str
    created_at: int
    created_by: str
    storage_path: str
    format: FormatName
    size_bytes: int
    num_records: int
    schema: dict[str, str]
    splits: Splits
    metadata: dict[str, Any]
    tags: list[str]
    lineage: DatasetOrigin
    content_sha256: str
    artifact: Artifact
    checks: CheckStanding


class DatasetVersions(TypedDict):
    datasets: list[DatasetVersion]
    next_page_token: NotRequired[str]


class NewDatasetVersion(DatasetVersion):
    """`skipped` lists files left out as hidden or without records.

    `unread` counts records by unknown keys inside messages or tools, which no model is shown.
    """

    created: bool
    skipped: NotRequired[list[str]]
    unread: NotRequired[dict[str, int]]


class NotTaken(TypedDict):
    """Given values that differ from those of the existing version with the same content."""

    tags: NotRequired[list[str]]
    metadata: NotRequired[dict[str, Any]]
    format: NotRequired[str]


class KnownDatasetVersion(NewDatasetVersion):
    """The newest version, which has the same content."""

    not_taken: NotTaken


class FilePart(TypedDict):
    url: str
    sha256: str
    size: int


class DatasetFile(TypedDict):
    """The parts, concatenated in order, are the file."""

    path: str
    sha256: str
    size: int
    parts: list[FilePart]


class DatasetDownload(TypedDict):
    """`url` is that of a version with a single part, else null."""

    dataset: str
    url: str | None
    expires_at: int
    join: str
    files: list[DatasetFile]


log = logging.getLogger(__name__)


def versions_json(database: Database, versions: Sequence[DatasetRecord]) -> list[DatasetVersion]:
    """Convert versions to JSON, with the state of their checks as `checks`.

    A blocked version is neither split nor trained on. `problem` is why its last check or split failed, else empty.
    """
    identifiers = [version.id for version in versions]
    with database.read() as connection:
        standings = Validations(database).standings(identifiers, connection)
        problems = find_problems(connection, identifiers)
    reasons = {identifier: problem.problem for identifier, problem in problems.items()}
    return [
        cast(
            DatasetVersion,
            vars(version)
            | {
                "artifact": version.artifact,
                "checks": {**vars(standings[version.id]), "problem": reasons.get(version.id, "")},
            },
        )
        for version in versions
    ]


def version_json(database: Database, version: DatasetRecord) -> DatasetVersion:
    return versions_json(database, [version])[0]


def find_version(database: Database, dataset_id: str) -> DatasetRecord:
    """Return the version with the id in a path, whose owner access control has checked."""
    with database.read() as connection:
        return Datasets(database).get(dataset_id, connection)


def find_own_version(database: Database, identifier: str, caller: Caller) -> DatasetRecord:
    """Return the caller's organization's version named by a parameter (id or NAME@VERSION)."""
    if "@" in identifier:
        return Datasets(database).read(identifier, caller.organization)
    version = find_version(database, identifier)
    if version.organization != caller.organization:
        raise not_found(f"no dataset version has the id '{identifier}': see `hanzo-ml dataset list`")
    return version


@contextmanager
def reporting_data_loss(what: str) -> Iterator[None]:
    """Convert missing or corrupt files in the block to a 409 (DATA_LOSS)."""
    try:
        yield
    except (BrokenArtifact, FileNotFoundError) as error:
        log.error("%s cannot be read completely: %s", what, error)
        raise HanzoError(
            ErrorCode.DATA_LOSS,
            f"{what} cannot be read completely: the object store lost or changed a part of it, or it was deleted meanwhile. "
            "Restore the store, or create the version again from the same files, which replaces missing or changed parts",
        ) from None
