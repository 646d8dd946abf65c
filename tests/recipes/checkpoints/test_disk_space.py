"""On a full disk, local checkpoints that are already in the store are removed first."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.checkpoints.manager import CheckpointManager
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import StoreUnavailable

URI = "s3://hanzo-ml/checkpoints/run-1"
WEIGHTS = b"0123456789"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets={"checkpoints": "c"}))


def disk_of(size: int) -> Callable[[Path], int]:
    """Return a function giving the free space of a disk that holds only weights files."""
    return lambda folder: size - sum(file.stat().st_size for file in folder.rglob("weights"))


def save(checkpoints: CheckpointManager, *steps: int) -> None:
    for step in steps:
        with checkpoints.save(step) as folder:
            (folder / "weights").write_bytes(WEIGHTS)
        checkpoints.wait()


def test_oldest_local_checkpoints_are_evicted_but_stay_in_the_store(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = CheckpointManager(tmp_path / "local", store, URI, 3, free=disk_of(29))
    save(checkpoints, 1, 2, 3)
    assert checkpoints.local_steps() == [3, 2]
    assert checkpoints.stored_steps() == [3, 2, 1]
    assert "checkpoint 1 stays in the store only: the disk has no room for it" in capsys.readouterr().out
    save(checkpoints, 4)
    assert checkpoints.find_step(2) is not None, "one that gave way is found in the store"


def test_eviction_frees_only_what_is_needed(store: Store, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "local", store, URI, 3, free=disk_of(39))
    save(checkpoints, 1, 2, 3, 4)
    assert checkpoints.local_steps() == [4, 3, 2]


def test_no_checkpoint_is_evicted_with_enough_space(store: Store, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "local", store, URI, 3, free=disk_of(30))
    save(checkpoints, 1, 2, 3)
    assert checkpoints.local_steps() == [3, 2, 1]


def test_newest_checkpoint_is_never_evicted(store: Store, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "local", store, URI, 3, free=disk_of(0))
    save(checkpoints, 1, 2, 3)
    assert checkpoints.local_steps() == [3, 2]


def test_checkpoint_missing_in_the_store_is_not_evicted(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.checkpoints.upload.RETRY_PAUSES_SECONDS", ())
    buckets = tmp_path / "objects"
    checkpoints = CheckpointManager(tmp_path / "local", store, URI, 3, free=disk_of(0))
    save(checkpoints, 1)
    buckets.rename(tmp_path / "away")
    for step in (2, 3, 4):
        with checkpoints.save(step) as folder:
            (folder / "weights").write_bytes(WEIGHTS)
    with pytest.raises(StoreUnavailable, match="mount it again"):
        checkpoints.wait()
    assert checkpoints.local_steps() == [4, 3, 2]


class SlowStore(Store):
    """A store with slow uploads."""

    def put_file(self, uri: str, path: Path) -> None:
        time.sleep(0.2)
        super().put_file(uri, path)


def test_eviction_waits_for_an_upload_in_progress(store: Store, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "local", SlowStore(store.address), URI, 3, free=disk_of(29))
    for step in (1, 2, 3):
        with checkpoints.save(step) as folder:
            (folder / "weights").write_bytes(WEIGHTS)
    checkpoints.wait()
    assert checkpoints.local_steps() == [3, 2]


def test_checkpoint_to_be_read_is_not_evicted(store: Store, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "local", store, URI, 3, free=disk_of(39))
    save(checkpoints, 1, 2, 3)
    checkpoints = CheckpointManager(tmp_path / "local", store, URI, 3, free=disk_of(0))
    checkpoints.upload_missing()
    checkpoints.free_disk_space(kept_step=1)
    assert checkpoints.local_steps() == [3, 1]


def test_eviction_makes_room_for_a_fetched_checkpoint(store: Store, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "local", store, URI, 3, free=disk_of(29))
    save(checkpoints, 1, 2, 3)
    assert checkpoints.find_step(1) is not None
    assert checkpoints.local_steps() == [3, 1]


def test_checkpoints_from_before_a_restart_are_evicted(store: Store, tmp_path: Path) -> None:
    save(CheckpointManager(tmp_path / "local", store, URI, 3), 1, 2, 3)
    again = CheckpointManager(tmp_path / "local", store, URI, 3, free=disk_of(0))
    again.upload_missing()
    save(again, 4)
    assert again.local_steps() == [4, 3]


def test_branch_evicts_on_the_same_disk(store: Store, tmp_path: Path) -> None:
    way = CheckpointManager(tmp_path / "local", store, URI, 3, free=disk_of(0)).branch("from-4", 4)
    save(way, 5, 6, 7)
    assert way.local_steps() == [7, 6]


def test_compressed_upload_reserves_space_for_its_copy(store: Store, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "local", store, URI, 3, "zstd", free=disk_of(39))
    save(checkpoints, 1, 2, 3)
    assert checkpoints.local_steps() == [3, 2]
