"""Control planes with a database and a store of their own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.storage.manifest import canonical_json
from resources.ingest.version_creation import create_version
from tests.recipes.preparation.preparation_workspace import questions
from tests.support.migrated_database import migrate


@contextmanager
def isolated_plane(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    """Yield a control plane with an empty database below `home`.

    Of the caller's settings, only the ports apply.
    """
    for name in [name for name in os.environ if name.startswith("HANZO_ML_") and not name.endswith("_PORT")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HANZO_ML_HOME", str(home))
    plane = ControlPlane()
    migrate(plane.database)
    yield plane
    plane.database.close()


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    """Yield a control plane with a dataset `d` of 60 questions."""
    raw = tmp_path / "d.jsonl"
    raw.write_bytes(b"".join(canonical_json(row) + b"\n" for row in questions(60)))
    with isolated_plane(tmp_path / "home", monkeypatch) as plane:
        create_version(plane.database, plane.store, name="d", path=raw, user="u", organization="default")
        yield plane
