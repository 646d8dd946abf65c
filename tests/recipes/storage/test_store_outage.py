"""An unmounted network folder is a store outage, not an empty store.

Requests fail with an outage error, and nothing is created at the mount point.
"""

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import obstore
import pytest

from recipes.checkpoints import upload
from recipes.checkpoints.manager import CheckpointManager
from recipes.contracts.job import StoreAddress
from recipes.storage import buckets
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import StoreUnavailable, is_mounted
from recipes.storage.manifest import Artifact, FileRecord
from recipes.training.checkpointing.resume_point import find_resume_checkpoint

BUCKETS = {"datasets": "hanzo-ml-datasets", "checkpoints": "hanzo-ml-checkpoints", "models": "hanzo-models"}
DATASET = "s3://hanzo-ml/datasets/d/1/records"
CHECKPOINTS = "s3://hanzo-ml/checkpoints/run"


class Folder:
    """A store root that can be unmounted, with or without leaving an empty mount point."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.elsewhere = root.with_name("elsewhere")
        self.address = StoreAddress(root=root.as_uri(), buckets=BUCKETS)

    def go(self, *, mount_point: bool) -> None:
        self.root.rename(self.elsewhere)
        if mount_point:
            self.root.mkdir()

    def come(self) -> None:
        if self.root.exists():
            self.root.rmdir()  # fails if anything was created in it meanwhile
        self.elsewhere.rename(self.root)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "objects")


@pytest.fixture
def artifact(folder: Folder, tmp_path: Path) -> Artifact:
    files = tmp_path / "files"
    files.mkdir()
    (files / "a.jsonl").write_bytes(b"one\n")
    return Store(folder.address).publish(files, DATASET, "dataset")


async def arriving() -> AsyncIterator[bytes]:
    yield b"two\n"


ASKED: dict[str, Callable[[Store, Artifact, Path], Any]] = {
    "get": lambda store, artifact, scratch: store.get_bytes(f"{DATASET}/a.jsonl"),
    "list": lambda store, artifact, scratch: store.list(DATASET),
    "below": lambda store, artifact, scratch: store.list_folder(DATASET),
    "exists": lambda store, artifact, scratch: store.exists(DATASET),
    "find": lambda store, artifact, scratch: store.find(DATASET),
    "manifest": lambda store, artifact, scratch: store.manifest(artifact),
    "pieces": lambda store, artifact, scratch: list(store.pieces(DATASET, FileRecord(path="a.jsonl", sha256="", size=4))),
    "put": lambda store, artifact, scratch: store.put_bytes(f"{DATASET}/b.jsonl", b"two\n"),
    "put_file": lambda store, artifact, scratch: store.put_file(f"{DATASET}/b.jsonl", Path(__file__)),
    "put_stream": lambda store, artifact, scratch: asyncio.run(store.put_stream(f"{DATASET}/b.jsonl", arriving())),
    "copy": lambda store, artifact, scratch: store.copy(f"{DATASET}/a.jsonl", f"{DATASET}/b.jsonl"),
    "delete": lambda store, artifact, scratch: store.delete(DATASET),
    "remove": lambda store, artifact, scratch: store.remove(f"{DATASET}/a.jsonl"),
    "fetch": lambda store, artifact, scratch: store.fetch(artifact, scratch),
}


@pytest.mark.parametrize("mount_point", [False, True], ids=["moved", "unmounted"])
@pytest.mark.parametrize("opened", [False, True], ids=["by a new process", "by one that knew it"])
@pytest.mark.parametrize("asked", ASKED)
def test_unmounted_store_is_an_outage_not_an_empty_store(
    folder: Folder, artifact: Artifact, tmp_path: Path, asked: str, opened: bool, mount_point: bool
) -> None:
    store = Store(folder.address)
    if opened:
        assert store.list(DATASET)
    folder.go(mount_point=mount_point)
    with pytest.raises(StoreUnavailable):
        ASKED[asked](store, artifact, tmp_path / "scratch")
    folder.come()
    assert store.list(DATASET) == [f"{DATASET}/a.jsonl", f"{DATASET}/manifest.json"]


def test_bucket_is_created_on_first_use(folder: Folder, artifact: Artifact) -> None:
    store = Store(folder.address)
    assert store.list(CHECKPOINTS) == []
    store.put_bytes(f"{CHECKPOINTS}/incidents.json", b"{}")
    assert store.list(CHECKPOINTS) == [f"{CHECKPOINTS}/incidents.json"]


def test_single_bucket_can_be_unmounted(folder: Folder, artifact: Artifact, tmp_path: Path) -> None:
    store = Store(folder.address)
    store.put_bytes(f"{CHECKPOINTS}/incidents.json", b"{}")
    bucket = folder.root / BUCKETS["checkpoints"]
    bucket.rename(tmp_path / "elsewhere")
    bucket.mkdir()
    for asking in (store, Store(folder.address)):
        with pytest.raises(StoreUnavailable):
            asking.list(CHECKPOINTS)
    assert store.list(DATASET)


def test_store_of_an_earlier_release_is_adopted(folder: Folder, artifact: Artifact) -> None:
    shutil.rmtree(folder.root.with_name(".objects-made"))
    for mark in folder.root.glob("*/.bucket"):
        mark.unlink()
    store = Store(folder.address)
    assert store.find(DATASET) == artifact
    folder.go(mount_point=True)
    with pytest.raises(StoreUnavailable):
        store.find(DATASET)


def test_permanently_lost_store_is_recreated_after_removing_its_marker(folder: Folder, artifact: Artifact) -> None:
    shutil.rmtree(folder.root)
    with pytest.raises(StoreUnavailable, match=r"remove .*/\.objects-made/hanzo-ml-datasets ") as raised:
        Store(folder.address).list(DATASET)
    Path(str(raised.value).partition("remove ")[2].partition(" to use")[0]).unlink()
    assert Store(folder.address).list(DATASET) == []


@pytest.mark.parametrize("mount_point", [False, True], ids=["moved", "unmounted"])
def test_bucket_unmounted_during_open_is_not_recreated(
    folder: Folder, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, mount_point: bool
) -> None:
    def then_away(bucket: Path) -> bool:
        there = is_mounted(bucket)
        folder.go(mount_point=mount_point)
        return there

    with monkeypatch.context() as going:
        going.setattr(buckets, "is_mounted", then_away)
        with pytest.raises(StoreUnavailable):
            Store(folder.address).find(DATASET)
    folder.come()
    assert Store(folder.address).find(DATASET) == artifact


def test_unresponsive_network_folder_is_an_outage(
    folder: Folder, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: Path) -> bool:
        raise OSError(errno.EIO, "it does not answer")

    store = Store(folder.address)
    assert store.find(DATASET) == artifact
    with monkeypatch.context() as failing, pytest.raises(StoreUnavailable):
        failing.setattr(Path, "exists", stale)
        store.put_bytes(f"{DATASET}/b.jsonl", b"two\n")
    assert store.list(DATASET) == [f"{DATASET}/a.jsonl", f"{DATASET}/manifest.json"]


def test_put_during_unmount_is_an_outage(folder: Folder, artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the library recreated the folders, after which all stored objects looked deleted."""
    put = obstore.put

    def then_away(*given: Any, **options: Any) -> Any:
        folder.go(mount_point=False)
        return put(*given, **options)

    monkeypatch.setattr(obstore, "put", then_away)
    store = Store(folder.address)
    with pytest.raises(StoreUnavailable):
        store.put_bytes(f"{DATASET}/b.jsonl", b"two\n")
    for asking in (store, Store(folder.address)):
        with pytest.raises(StoreUnavailable):
            asking.list(DATASET)
    shutil.rmtree(folder.root)
    folder.come()
    assert store.find(DATASET) == artifact


def test_folder_unmounted_during_listing_is_an_outage(
    folder: Folder, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(folder.address)
    store.put_bytes(f"{DATASET}/inner/b.jsonl", b"two\n")
    scan = os.scandir

    def then_away(place: Any) -> Any:
        if Path(place).name == "inner":
            folder.go(mount_point=False)
        return scan(place)

    monkeypatch.setattr(os, "scandir", then_away)
    with pytest.raises(StoreUnavailable):
        store.list(DATASET)


def test_folder_unmounted_during_read_is_an_outage(folder: Folder, artifact: Artifact) -> None:
    found = Store(folder.address).open(f"{DATASET}/a.jsonl")
    folder.go(mount_point=True)
    with pytest.raises(StoreUnavailable):
        list(found.chunks())


def saved(checkpoints: CheckpointManager, step: int) -> None:
    with checkpoints.save(step) as place:
        (place / "weights").write_bytes(b"%d" % step)
    checkpoints.wait_for_commit()


@pytest.mark.parametrize("mount_point", [False, True], ids=["moved", "unmounted"])
def test_training_does_not_restart_from_scratch_during_an_outage(folder: Folder, tmp_path: Path, mount_point: bool) -> None:
    first = CheckpointManager(tmp_path / "machine", Store(folder.address), CHECKPOINTS, 2)
    saved(first, 3)
    first.wait()
    folder.go(mount_point=mount_point)
    other_machine = CheckpointManager(tmp_path / "other machine", Store(folder.address), CHECKPOINTS, 2)
    with pytest.raises(StoreUnavailable):
        find_resume_checkpoint(other_machine, "latest")
    folder.come()
    _, found = find_resume_checkpoint(other_machine, "latest")
    assert found is not None and found[0] == 3


@pytest.mark.parametrize("mount_point", [False, True], ids=["moved", "unmounted"])
def test_checkpoints_saved_during_an_outage_are_uploaded_afterwards(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount_point: bool
) -> None:
    monkeypatch.setattr(upload, "RETRY_PAUSES_SECONDS", ())
    checkpoints = CheckpointManager(tmp_path / "machine", Store(folder.address), CHECKPOINTS, 2)
    saved(checkpoints, 1)
    checkpoints.wait()
    folder.go(mount_point=mount_point)
    saved(checkpoints, 2)
    with pytest.raises(StoreUnavailable):
        checkpoints.wait()
    folder.come()
    saved(checkpoints, 3)
    checkpoints.wait()
    assert checkpoints.stored_steps() == [3, 2]
