"""A run on several machines goes on from one checkpoint: what one of them offers, the others take, whatever they have."""

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


def test_what_was_on_its_way_to_the_store_as_its_machine_was_killed_is_offered(store: Store, tmp_path: Path) -> None:
    first, second = machine(tmp_path, "first", store), machine(tmp_path, "second", store)
    save(first, 8, "of 8")
    store.delete(f"{URI}/8")
    first.ensure_uploaded(8)
    second.ensure_local(8, read_content_digest(first.folder / "8"))
    assert (second.folder / "8" / "weights").read_text() == "of 8"


def test_what_the_store_has_is_not_uploaded_once_more(store: Store, tmp_path: Path) -> None:
    first = machine(tmp_path, "first", store)
    save(first, 8, "of 8")
    uploaded = store.local_path(f"{URI}/8/weights")
    assert uploaded
    before = uploaded.stat()
    first.ensure_uploaded(8)
    assert (uploaded.stat().st_ino, uploaded.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_other_weights_of_the_same_step_are_not_gone_on_from(store: Store, tmp_path: Path) -> None:
    """The run was healed while this machine had no part in it, and came to the step once more."""
    first, second = machine(tmp_path, "first", store), machine(tmp_path, "second", store)
    save(first, 8, "diverged")
    second.ensure_local(8, read_content_digest(first.folder / "8"))
    first.discard_from(8)
    save(first, 8, "healed")
    second.ensure_local(8, read_content_digest(first.folder / "8"))
    assert (second.folder / "8" / "weights").read_text() == "healed"


def test_a_loss_that_was_told_since_is_no_other_content(store: Store, tmp_path: Path) -> None:
    """It would be fetched again, which takes minutes where it is large."""
    first, second = machine(tmp_path, "first", store), machine(tmp_path, "second", store)
    save(first, 8, "of 8")
    second.ensure_local(8, read_content_digest(first.folder / "8"))
    first.update_metadata(8, {"validation_loss": 1.5})
    first.wait()
    store.delete(f"{URI}/8")
    second.ensure_local(8, read_content_digest(first.folder / "8"))


def test_that_the_store_has_another_one_or_none_is_said(store: Store, tmp_path: Path) -> None:
    first, second = machine(tmp_path, "first", store), machine(tmp_path, "second", store)
    with pytest.raises(Restart, match="run-1/8 is not the checkpoint that the first node resumes from"):
        second.ensure_local(8, "of nothing")
    save(first, 8, "of 8")
    with pytest.raises(Restart, match="run-1/8 is not"):
        second.ensure_local(8, "of nothing")


def test_where_there_is_no_checkpoint_it_has_no_content(tmp_path: Path) -> None:
    assert read_content_digest(tmp_path / "8") == ""
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "manifest.json").write_text("{")
    assert read_content_digest(tmp_path / "8") == ""


def test_one_that_is_broken_in_the_store_is_offered_anew(store: Store, tmp_path: Path) -> None:
    first, second = machine(tmp_path, "first", store), machine(tmp_path, "second", store)
    save(first, 8, "of 8")
    store.put_bytes(f"{URI}/8/weights", b"torn")
    with pytest.raises(Restart):
        second.ensure_local(8, read_content_digest(first.folder / "8"))
    first.ensure_uploaded(8)
    second.ensure_local(8, read_content_digest(first.folder / "8"))
    assert (second.folder / "8" / "weights").read_text() == "of 8"
