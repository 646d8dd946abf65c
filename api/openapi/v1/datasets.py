"""Dataset versions: what one says of itself, and addresses of its files (rows B2-B7)."""

from typing import Any, Literal

import msgspec

from api.openapi.v1.artifacts import Artifact
from api.schemas.mlflow.responses import Message

CheckStatus = Literal["pending", "passed", "failed", "blocked"]


class Split(Message):
    path: str
    num_records: int
    size_bytes: int
    artifact: Artifact


class Splits(Message):
    """None while the version is not split yet."""

    train: Split | msgspec.UnsetType = msgspec.UNSET
    validation: Split | msgspec.UnsetType = msgspec.UNSET
    test: Split | msgspec.UnsetType = msgspec.UNSET


class DatasetOrigin(Message):
    """`origins` are addresses at which the raw files could be had, of a version that was fetched."""

    parent_datasets: list[str]
    transform: Any
    origins: list[str] = []


class CheckStanding(Message):
    """`blocked` is why nothing may be made of the version, `problem` why it could not be checked or split; else empty."""

    status: CheckStatus
    blocked: str
    problem: str


class DatasetVersion(Message):
    """`schema` maps a column to type names."""

    id: str
    name: str
    version: int
    organization: str
    created_at: int
    created_by: str
    storage_path: str
    format: Literal["jsonl", "parquet", "csv", "arrow", "text"]
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


class DatasetVersions(Message):
    datasets: list[DatasetVersion]
    next_page_token: str = ""


class NewDatasetVersion(DatasetVersion):
    created: bool


class NotTaken(Message):
    """What was said of files whose content is a version already, and that the version does not say."""

    tags: list[str] = []
    metadata: dict[str, Any] = {}
    format: str = ""


class KnownDatasetVersion(NewDatasetVersion):
    """The newest version, which holds the same."""

    not_taken: NotTaken


class FilePart(Message):
    url: str
    sha256: str
    size: int


class DatasetFile(Message):
    """Its parts, one behind the other in their order, are the file."""

    path: str
    sha256: str
    size: int
    parts: list[FilePart]


class DatasetDownload(Message):
    """`url` is the one of a version that is one file in one part, else null."""

    dataset: str
    url: str | None
    expires_at: int
    join: str
    files: list[DatasetFile]
