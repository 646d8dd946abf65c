"""Stored versions of a corpus, and the chunks that they share."""

import random
from pathlib import Path

import pytest

from recipes.contracts.dataset_formats import Format
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from resources.ingest.new_version import NewVersion
from resources.ingest.source_files import local_files
from resources.ingest.version_creation import create_from_files
from resources.metadata.database import Database
from resources.metadata.datasets import DatasetVersion
from tests.resources.metadata.conftest import database, database_url, migrated_sqlite, postgres, postgres_url, sqlite_url
from tests.support.resources.dataset_versions import BUCKETS
from tests.support.s3_server import VARIABLES, S3Server

__all__ = ["database", "database_url", "migrated_sqlite", "postgres", "postgres_url", "sqlite_url"]

ALL = "s3://hanzo-ml/datasets"

CHUNKS = f"{ALL}/_chunks"


@pytest.fixture
def store(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> Store:
    """A folder for SQLite, S3 for PostgreSQL: the two are independent."""
    if database_url.startswith("sqlite"):
        return in_folder(tmp_path)
    s3: S3Server = request.getfixturevalue("s3")
    return Store(s3.address, VARIABLES)


def in_folder(folder: Path) -> Store:
    return Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=BUCKETS))


def corpus(size: int, seed: int = 0) -> list[str]:
    """Return lines of records, `size` bytes in total."""
    draw = random.Random(seed)
    found: list[str] = []
    length = 0
    while length < size:
        found.append(f'{{"id": {len(found)}, "text": "{draw.randbytes(420).hex()}"}}\n')
        length += len(found[-1])
    return found


def create(
    database: Database, store: Store, folder: Path, content: str, name: str = "d", organization: str = "default"
) -> tuple[DatasetVersion, bool]:
    path = folder / f"{name}.jsonl"
    path.write_text(content)
    return create_from_files(database, store, NewVersion(name, "jsonl", "u", organization), local_files(path, Format.JSONL))


def stored(store: Store) -> int:
    return sum(entry.size for entry in store.entries(ALL))


def chunks(store: Store) -> set[str]:
    return set(store.list(CHUNKS))
