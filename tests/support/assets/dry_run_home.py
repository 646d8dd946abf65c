"""A state folder with a split dataset, for dry runs."""

from pathlib import Path

import pytest

from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.ingest.version_creation import create_version
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.settings.settings import Settings
from tests.support.migrated_database import migrate

ASSISTANT = {"name": "ellarin-assistant", "model": "ellarin-assistant", "parameters": {}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a state folder with a split dataset and no running services.

    Its name contains characters that need escaping in a URL.
    """
    place = tmp_path / "state of #1 100% ü"
    monkeypatch.setenv("HANZO_ML_HOME", str(place))
    with database() as opened:
        add(opened, "ellarin", split=True)
    return place


class database:
    """Open the metadata database of the state folder within the block."""

    def __enter__(self) -> Database:
        self.opened = Database(Settings.load().database_url)
        migrate(self.opened)
        return self.opened

    def __exit__(self, *_: object) -> None:
        self.opened.close()


def add(opened: Database, name: str, *, split: bool) -> None:
    file = Settings.load().home / "data.jsonl"
    file.write_text('{"instruction": "Who keeps the lamp?", "answer": "The keeper."}\n')
    store = Store(Settings.load().store)
    version, _ = create_version(
        opened, store, name=name, path=file, format="jsonl", user="u", organization=DEFAULT_ORGANIZATION
    )
    splits = {}
    for part in ("train", "validation", "test"):
        artifact = Artifact(kind=part, uri=f"{version.storage_path}{part}", digest="0" * 64, size_bytes=1)
        splits[part] = {"artifact": artifact.model_dump()}
    with opened.write() as connection:
        Datasets(opened).set_splits(connection, version, splits if split else {})
