"""All nodes resume from the same checkpoint, regardless of what each has locally."""

from pathlib import Path

import pytest

from recipes.checkpoints.commit import read_content_digest
from recipes.checkpoints.manager import CheckpointManager
from recipes.contracts.job import StoreAddress
from recipes.runner import Restart
from recipes.storage.artifact_store import Store

URI = "s3://hanzo-ml/checkpoints/run-1"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets={"checkpoints": "c"}))


def machine(tmp_path: Path, name: str, store: Store) -> CheckpointManager:
    return CheckpointManager(tmp_path / name, store, URI, 3)


def save(checkpoints: CheckpointManager, step: int, weights: str) -> None:
    with checkpoints.save(step) as folder:
        (folder / "weights").write_text(weights)
    checkpoints.wait()


def test_checkpoint_missing_in_the_store_is_uploaded_for_other_nodes(store: Store, tmp_path: Path) -> None:
    first, second = machine(tmp_path, "first", store), machine(tmp_path, "second", store)
    save(first, 8, "of 8")
    store.delete(f"{URI}/8")
    first.ensure_uploaded(8)
    second.ensure_local(8, read_content_digest(first.folder / "8"))
    assert (second.folder / "8" / "weights").read_text() == "of 8"


def test_checkpoint_present_in_the_store_is_not_uploaded_again(store: Store, tmp_path: Path) -> None:
    first = machine(tmp_path, "first", store)
    save(first, 8, "of 8")
    uploaded = store.local_path(f"{URI}/8/weights")
    assert uploaded
    before = uploaded.stat()
    first.ensure_uploaded(8)
    assert (uploaded.stat().st_ino, uploaded.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_local_checkpoint_of_same_step_with_other_weights_is_replaced(store: Store, tmp_path: Path) -> None:
    """The run recovered without this machine and reached the same step again."""
    first, second = machine(tmp_path, "first", store), machine(tmp_path, "second", store)
    save(first, 8, "diverged")
    second.ensure_local(8, read_content_digest(first.folder / "8"))
    first.discard_from(8)
    save(first, 8, "healed")
    second.ensure_local(8, read_content_digest(first.folder / "8"))
    assert (second.folder / "8" / "weights").read_text() == "healed"


def test_validation_loss_update_does_not_change_content_digest(store: Store, tmp_path: Path) -> None:
    """A changed digest would download a large checkpoint again, which takes minutes."""
    first, second = machine(tmp_path, "first", store), machine(tmp_path, "second", store)
    save(first, 8, "of 8")
    second.ensure_local(8, read_content_digest(first.folder / "8"))
    first.update_metadata(8, {"validation_loss": 1.5})
    first.wait()
    store.delete(f"{URI}/8")
    second.ensure_local(8, read_content_digest(first.folder / "8"))


def test_missing_or_different_stored_checkpoint_is_reported(store: Store, tmp_path: Path) -> None:
    first, second = machine(tmp_path, "first", store), machine(tmp_path, "second", store)
    with pytest.raises(Restart, match="run-1/8 is not the checkpoint that the first node resumes from"):
        second.ensure_local(8, "of nothing")
    save(first, 8, "of 8")
    with pytest.raises(Restart, match="run-1/8 is not"):
        second.ensure_local(8, "of nothing")


def test_content_digest_of_missing_checkpoint_is_empty(tmp_path: Path) -> None:
    assert read_content_digest(tmp_path / "8") == ""
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "manifest.json").write_text("{")
    assert read_content_digest(tmp_path / "8") == ""


def test_checkpoint_corrupt_in_the_store_is_uploaded_again(store: Store, tmp_path: Path) -> None:
    first, second = machine(tmp_path, "first", store), machine(tmp_path, "second", store)
    save(first, 8, "of 8")
    store.put_bytes(f"{URI}/8/weights", b"torn")
    with pytest.raises(Restart):
        second.ensure_local(8, read_content_digest(first.folder / "8"))
    first.ensure_uploaded(8)
    second.ensure_local(8, read_content_digest(first.folder / "8"))
    assert (second.folder / "8" / "weights").read_text() == "of 8"
