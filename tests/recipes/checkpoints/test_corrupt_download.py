"""A checkpoint corrupted during download from S3 is not taken for a corrupt stored one."""

from pathlib import Path

import pytest

from recipes.checkpoints.commit import find_corruption
from recipes.checkpoints.manager import CheckpointManager
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from tests.support.s3_server import VARIABLES, S3Server

URI = "s3://hanzo-ml/checkpoints/run-1"


@pytest.fixture
def store(s3: S3Server, tmp_path: Path) -> Store:
    store = Store(s3.address, VARIABLES)
    checkpoints = CheckpointManager(tmp_path / "first", store, URI, 3)
    with checkpoints.save(1) as folder:
        (folder / "weights").write_bytes(bytes(range(256)) * 1000)
    checkpoints.wait()
    return store


@pytest.mark.parametrize("name", ["weights", MANIFEST_FILE])
def test_corruption_in_transit_does_not_delete_the_stored_checkpoint(
    store: Store, s3: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Regression: the intact stored checkpoint was deleted; without another one the run restarted from zero."""
    s3.spoiling = name
    found = CheckpointManager(tmp_path / "new", store, URI, 3).latest()
    assert not s3.spoiling, "it was asked for"
    assert found and found[0] == 1 and find_corruption(found[1], 1) is None
    assert store.find(f"{URI}/1")
    assert "checkpoint 1 was corrupted in transit" in capsys.readouterr().out


def test_checkpoint_downloaded_corrupt_twice_is_treated_as_corrupt(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.put_bytes(f"{URI}/1/weights", b"spoiled")
    assert CheckpointManager(tmp_path / "new", store, URI, 3).latest() is None
    assert store.list(URI) == []
    assert "uploaded checkpoint 1 is broken" in capsys.readouterr().out
