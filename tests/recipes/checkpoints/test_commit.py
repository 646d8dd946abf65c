"""Durability of a checkpoint commit: a power failure leaves a complete checkpoint or none."""

import os
from pathlib import Path

import pytest

from recipes.checkpoints.commit import commit_checkpoint, find_corruption, update_metadata
from recipes.storage.artifact_store import MANIFEST_FILE

FILES = ("adapter_model.safetensors", "optimizer.pt", "rng/state.bin")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """Record fsync and rename calls, in order: what is flushed, and the new name."""
    calls: list[tuple[str, Path]] = []
    flush, rename = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        calls.append(("flush", Path(f"/proc/self/fd/{descriptor}").readlink()))
        flush(descriptor)

    def renamed(old: Path, new: Path) -> None:
        calls.append(("name", Path(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    return calls


def test_commit_flushes_everything_before_rename(tmp_path: Path, done: list[tuple[str, Path]]) -> None:
    scratch, target = tmp_path / ".4.tmp", tmp_path / "4"
    for name in FILES:
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).write_bytes(b"numbers")
    commit_checkpoint(scratch, target, {})
    *before, named, after = done
    assert {path for what, path in before if what == "flush"} >= {scratch / name for name in (*FILES, MANIFEST_FILE, "rng")}
    assert (named, after) == (("name", target), ("flush", tmp_path)), "and its name is too"
    assert find_corruption(target, 4) is None
    done.clear()
    update_metadata(target, {"validation_loss": 0.5})
    assert done == [("flush", target / f".{MANIFEST_FILE}"), ("name", target / MANIFEST_FILE), ("flush", target)]
    assert find_corruption(target, 4) is None
