"""Dataset versions on a folder or S3, with SQLite or PostgreSQL."""

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import BUCKET_MARKER
from resources.errors import HanzoError
from resources.ingest.version_creation import create_version
from resources.lineage.edges import find_artifact, parent_digests
from resources.metadata.database import Database
from resources.metadata.datasets import DatasetVersion
from resources.metadata.outbox import read_after
from resources.metadata.tables import artifacts, dataset_versions
from tests.support.migrated_database import migrate

BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}


def lines(count: int, offset: int = 0) -> str:
    return "".join(json.dumps({"instruction": f"Q{n}", "answer": f"A{n}"}) + "\n" for n in range(offset, offset + count))


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = Database(f"sqlite:///{folder}/metadata.db")
        migrate(self.database)
        self.store = Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=BUCKETS))

    def create(self, content: bytes | str | Path, name: str = "d", **more: Any) -> tuple[DatasetVersion, bool]:
        path = content if isinstance(content, Path) else self.folder / "raw.jsonl"
        if not isinstance(content, Path):
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        more = {"user": "u", "organization": "default", **more}
        return create_version(self.database, self.store, name=name, path=path, **more)

    def source(self, version: DatasetVersion) -> Path:
        """Return the folder of a version's raw files."""
        with self.database.read() as connection:
            found = find_artifact(connection, parent_digests(connection, version.artifact.digest)["source"])
        assert found is not None
        return self.store.fetch(found, self.folder / "cache")

    def refusal(self, content: bytes | str | Path, **more: Any) -> str:
        """Return the message of a refusal and assert that it left no trace."""
        with pytest.raises(HanzoError) as caught:
            self.create(content, **more)
        assert "\n" not in caught.value.message
        with self.database.read() as connection:
            assert connection.execute(select(func.count()).select_from(dataset_versions)).scalar() == 0
            assert connection.execute(select(func.count()).select_from(artifacts)).scalar() == 0
            assert read_after(connection, 0) == []
        objects = self.folder / "objects"
        assert [path for path in objects.rglob("*") if path.is_file() and path.name != BUCKET_MARKER] == []
        return caught.value.message
