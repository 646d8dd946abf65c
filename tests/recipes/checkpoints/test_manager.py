"""Checkpoints: atomic saves, fallback from corrupt ones, recovery after losing a machine."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recipes.checkpoints.manager
from recipes.checkpoints.commit import commit_checkpoint, find_corruption
from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.remote import SLOW_UPLOAD_SECONDS, UPLOAD_FOLDER
from recipes.checkpoints.retention import VALIDATION_LOSS_KEY
from recipes.contracts.job import Job, Program, StoreAddress
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.manifest import Artifact, Manifest

ROOT = Path(__file__).resolve().parents[3]
URI = "s3://hanzo-ml/checkpoints/run-1"
BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
FILES = {"adapter_model.safetensors": b"weights" * 50, "optimizer.pt": b"moments" * 70, "rng/state.bin": b"\0\1\2" * 9}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS))


def opened(store: Store, tmp_path: Path, keep_last: int = 3) -> CheckpointManager:
    return CheckpointManager(tmp_path / "local", store, URI, keep_last)


def content(step: int, name: str) -> bytes:
    return f"{step} ".encode() + FILES[name]


def save(checkpoints: CheckpointManager, *steps: int) -> None:
    for step in steps:
        with checkpoints.save(step) as folder:
            for name in FILES:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content(step, name))
    checkpoints.wait()


def assert_whole(found: tuple[int, Path] | None, step: int) -> None:
    assert found is not None
    assert found[0] == step
    assert {name: (found[1] / name).read_bytes() for name in FILES} == {name: content(step, name) for name in FILES}
    assert find_corruption(found[1], step) is None


def stored(store: Store, step: int, name: str) -> Path:
    path = store.local_path(f"{URI}/{step}/{name}")
    assert path is not None
    return path


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


def test_latest_returns_the_newest_checkpoint(store: Store, tmp_path: Path) -> None:
    checkpoints = opened(store, tmp_path)
    assert checkpoints.latest() is None
    save(checkpoints, 9, 10)
    assert_whole(opened(store, tmp_path).latest(), 10)


def test_commit_runs_in_background_while_training_continues(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    may_end = threading.Event()

    def held(*given: Any) -> Any:
        assert may_end.wait(60)
        return commit_checkpoint(*given)

    monkeypatch.setattr(recipes.checkpoints.manager, "commit_checkpoint", held)
    checkpoints = opened(store, tmp_path)
    with checkpoints.save(1, log_message="there is one") as folder:
        (folder / "optimizer.pt").write_bytes(b"moments")
    assert (checkpoints.local_steps(), capfd.readouterr().out) == ([], "")
    may_end.set()
    found = checkpoints.latest()  # waits for the commit
    assert found and found[0] == 1 and find_corruption(found[1], 1) is None
    assert "there is one" in capfd.readouterr().out


def test_failed_commit_is_raised_at_the_next_save(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = opened(store, tmp_path)
    save(checkpoints, 1)
    with monkeypatch.context() as patched:
        patched.setattr(recipes.checkpoints.manager, "commit_checkpoint", full)
        with checkpoints.save(2):
            pass
        with pytest.raises(OSError, match="No space left"), checkpoints.save(3):
            pass
    assert not list(checkpoints.folder.glob(".*"))
    assert checkpoints.local_steps() == [1]


def test_download_that_filled_the_disk_is_removed_and_retried_later(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `exit.json` was not written either; the program was restarted twelve times as killed."""

    def half(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    save(opened(store, tmp_path), 1)
    shutil.rmtree(tmp_path / "local")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", half)
        with pytest.raises(OSError, match="No space left"):
            opened(store, tmp_path).latest()
    assert not [*(tmp_path / "local").iterdir()]
    assert_whole(opened(store, tmp_path).latest(), 1)


def test_save_flushes_all_files_and_folders_before_rename(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an fsync of the directory a power failure can lose its entries."""
    flush, replace, flushed, needed = os.fsync, os.replace, set(), set()

    def remembered(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        flush(descriptor)

    def named(source: Path, target: Path) -> None:
        if target == tmp_path / "local" / "1":
            needed.update(path.stat().st_ino for path in (source, *source.rglob("*")))
            assert needed <= flushed
        replace(source, target)

    monkeypatch.setattr(os, "fsync", remembered)
    monkeypatch.setattr(os, "replace", named)
    save(opened(store, tmp_path), 1)
    assert len(needed) == 6  # three files, a subfolder, the manifest and the checkpoint folder


def test_an_error_while_writing_leaves_no_checkpoint(store: Store, tmp_path: Path) -> None:
    checkpoints = opened(store, tmp_path)
    save(checkpoints, 1)
    with pytest.raises(RuntimeError, match="halfway"), checkpoints.save(2) as folder:
        (folder / "adapter_model.safetensors").write_bytes(b"half")
        raise RuntimeError("halfway")
    checkpoints.wait()
    assert [path.name for path in (tmp_path / "local").iterdir()] == ["1"]
    assert checkpoints.stored_steps() == [1]
    assert_whole(opened(store, tmp_path).latest(), 1)


KILLED = """
import os, signal, sys
from pathlib import Path
from recipes.checkpoints.manager import CheckpointManager
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
store = Store(StoreAddress.model_validate_json(sys.argv[2]))
checkpoints = CheckpointManager(Path(sys.argv[1]), store, sys.argv[3], 3)
with checkpoints.save(2) as folder:
    (folder / "adapter_model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_while_writing_leaves_no_checkpoint_and_the_step_can_be_written_again(store: Store, tmp_path: Path) -> None:
    checkpoints = opened(store, tmp_path)
    save(checkpoints, 1)
    arguments = [str(tmp_path / "local"), store.address.model_dump_json(), URI]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "local" / ".2.tmp").is_dir()
    resumed = opened(store, tmp_path)
    assert_whole(resumed.latest(), 1)
    assert not (tmp_path / "local" / ".2.tmp").exists(), "it would take its place on the disk for good"
    save(resumed, 2)
    assert_whole(opened(store, tmp_path).latest(), 2)
    assert sorted(path.name for path in (tmp_path / "local").iterdir()) == ["1", "2"]


SEALED_ONLY = """
import os, shutil, signal, sys
from pathlib import Path
from recipes.checkpoints.commit import commit_checkpoint
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
commit_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), {"again": True})
"""


@pytest.mark.parametrize("there", ["whole", "half", "nothing"])
def test_kill_before_rename_loses_neither_old_nor_new_checkpoint(
    store: Store, tmp_path: Path, there: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The commit removes the old folder first: the temporary one may be the only copy."""
    checkpoints = opened(store, tmp_path)
    save(checkpoints, 1, 2)
    scratch, target = tmp_path / "local" / ".2.tmp", tmp_path / "local" / "2"
    shutil.copytree(target, scratch)
    if there != "whole":
        shutil.rmtree(target)
    done = subprocess.run([sys.executable, "-c", SEALED_ONLY, str(scratch), str(target)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    if there == "half":
        shutil.copytree(scratch, target, ignore=shutil.ignore_patterns("optimizer.pt"))
    store.delete(f"{URI}/2")
    resumed = opened(store, tmp_path)
    assert_whole(resumed.latest(), 2)
    assert "checkpoint 2 was complete: commit finished" in capfd.readouterr().out
    assert sorted(path.name for path in (tmp_path / "local").iterdir()) == ["1", "2"]
    resumed.upload_missing()
    resumed.wait()
    assert resumed.stored_steps() == [2, 1]


@pytest.mark.requirement("I8")
def test_committed_checkpoint_is_not_replaced_by_leftover_of_a_kill(store: Store, tmp_path: Path) -> None:
    save(opened(store, tmp_path), 1)
    scratch, target = tmp_path / "local" / ".1.tmp", tmp_path / "local" / "1"
    shutil.copytree(target, scratch)
    node = target.stat().st_ino
    assert_whole(opened(store, tmp_path).find_step(1), 1)
    assert (target.stat().st_ino, scratch.exists()) == (node, False)


def test_saving_a_step_again_replaces_its_checkpoint(store: Store, tmp_path: Path) -> None:
    checkpoints = opened(store, tmp_path)
    with checkpoints.save(2) as folder:
        (folder / "old.bin").write_bytes(b"of another attempt")
    save(checkpoints, 2)
    found = checkpoints.latest()
    assert_whole(found, 2)
    assert found is not None and not (found[1] / "old.bin").exists()


DAMAGE = {
    "truncated": lambda folder: os.truncate(folder / "optimizer.pt", 20),
    "empty file": lambda folder: os.truncate(folder / "adapter_model.safetensors", 0),
    "a bit flipped": lambda folder: flip(folder / "adapter_model.safetensors", 77),
    "a bit flipped deep down": lambda folder: flip(folder / "rng/state.bin", 3),
    "a file gone": lambda folder: (folder / "optimizer.pt").unlink(),
    "no manifest": lambda folder: (folder / MANIFEST_FILE).unlink(),
    "half a manifest": lambda folder: os.truncate(folder / MANIFEST_FILE, 40),
    "the manifest of another step": lambda folder: shutil.copy(folder.parent / "1" / MANIFEST_FILE, folder / MANIFEST_FILE),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_corrupt_newest_checkpoint_falls_back_with_a_log_line(
    store: Store, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(opened(store, tmp_path), 1, 2)
    DAMAGE[damage](tmp_path / "local" / "2")
    store.delete(f"{URI}/2")  # the upload had not finished
    capsys.readouterr()
    assert_whole(opened(store, tmp_path).latest(), 1)
    said = capsys.readouterr().out
    assert "checkpoint 2" in said and "falling back" in said
    assert opened(store, tmp_path).local_steps() == [1]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_local_checkpoint_is_restored_from_its_upload(
    store: Store, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(opened(store, tmp_path), 1, 2)
    DAMAGE[damage](tmp_path / "local" / "2")
    capsys.readouterr()
    assert_whole(opened(store, tmp_path).latest(), 2)
    assert "checkpoint 2 restored" in capsys.readouterr().out


@pytest.mark.parametrize("damage", DAMAGE)
def test_corrupt_upload_falls_back_with_a_log_line(
    store: Store, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(opened(store, tmp_path), 1, 2)
    DAMAGE[damage](stored(store, 2, MANIFEST_FILE).parent)
    shutil.rmtree(tmp_path / "local")
    capsys.readouterr()
    found = opened(store, tmp_path).latest()
    assert_whole(found, 1)
    if damage not in ("no manifest", "half a manifest"):  # without a manifest there is no upload, so nothing is logged
        assert "uploaded checkpoint 2 is broken" in capsys.readouterr().out


@given(bit=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_manifest_bit_loses_at_most_its_checkpoint(store: Store, tmp_path: Path, bit: int) -> None:
    shutil.rmtree(tmp_path / "local", ignore_errors=True)
    save(opened(store, tmp_path), 1, 2)
    store.delete(f"{URI}/2")
    flip(tmp_path / "local" / "2" / MANIFEST_FILE, bit)
    found = opened(store, tmp_path).latest()
    assert found is not None
    step = found[0]
    assert {name: (found[1] / name).read_bytes() for name in FILES} == {name: content(step, name) for name in FILES}


@pytest.mark.requirement("I9")
def test_a_machine_without_the_local_folder_restores_the_latest(store: Store, tmp_path: Path) -> None:
    save(opened(store, tmp_path), 1, 2, 3)
    shutil.rmtree(tmp_path / "local")
    assert_whole(opened(store, tmp_path).latest(), 3)


class Remote(Store):
    """A remote store: every file is downloaded."""

    def local_path(self, uri: str) -> Path | None:
        return None


def test_corrupt_restored_checkpoint_is_downloaded_again(store: Store, tmp_path: Path) -> None:
    save(opened(store, tmp_path), 1, 2)
    remote = Remote(store.address)
    shutil.rmtree(tmp_path / "local")
    assert_whole(opened(remote, tmp_path).latest(), 2)
    # The disk damages both the restored and the downloaded copy; the stored checkpoint is intact.
    for path in [*(tmp_path / "local").rglob("optimizer.pt")]:
        flip(path, 100)
    assert_whole(opened(remote, tmp_path).latest(), 2)


@pytest.mark.requirement("I1", "I8")
def test_only_the_newest_stay_locally_and_in_the_store(store: Store, tmp_path: Path) -> None:
    checkpoints = opened(store, tmp_path, keep_last=2)
    save(checkpoints, 8, 9, 10, 11)
    assert checkpoints.local_steps() == [11, 10]
    assert checkpoints.stored_steps() == [11, 10]
    assert {uri.removeprefix(URI + "/").split("/")[0] for uri in store.list(URI)} == {"10", "11"}
    folder = store.local_path(URI)
    assert folder is not None and {path.name for path in folder.iterdir()} == {"10", "11"}, "nor do empty folders"


def test_retention_ignores_run_with_common_name_prefix(store: Store, tmp_path: Path) -> None:
    save(CheckpointManager(tmp_path / "other", store, f"{URI}1", 3), 1)
    save(opened(store, tmp_path, keep_last=1), 1, 2, 3)
    assert CheckpointManager(tmp_path / "other", store, f"{URI}1", 3).stored_steps() == [1]


def test_upload_interrupted_by_a_kill_is_completed_on_resume(store: Store, tmp_path: Path) -> None:
    """Regression: until the next save a single machine had it, whose loss cost two intervals."""
    save(opened(store, tmp_path), 1, 2)
    (stored(store, 2, MANIFEST_FILE)).unlink()
    again = opened(store, tmp_path)
    assert_whole(again.latest(), 2)
    again.upload_missing()
    again.wait()
    shutil.rmtree(tmp_path / "local")
    assert_whole(opened(store, tmp_path).latest(), 2)
    stored(store, 2, "optimizer.pt").write_bytes(b"not sent again")
    again = opened(store, tmp_path)
    again.upload_missing()
    again.wait()
    assert stored(store, 2, "optimizer.pt").read_bytes() == b"not sent again"


@pytest.mark.requirement("I15")
def test_a_half_uploaded_checkpoint_is_never_the_latest(store: Store, tmp_path: Path) -> None:
    save(opened(store, tmp_path), 1)
    for name in FILES:  # all files except the manifest were uploaded
        store.put_bytes(f"{URI}/2/{name}", content(2, name))
    shutil.rmtree(tmp_path / "local")
    checkpoints = opened(store, tmp_path)
    assert checkpoints.stored_steps() == [1]
    assert_whole(checkpoints.latest(), 1)


def compressing(store: Store, tmp_path: Path, keep_last: int = 3) -> CheckpointManager:
    return CheckpointManager(tmp_path / "local", store, URI, keep_last, "zstd")


@pytest.mark.requirement("I8")
@pytest.mark.parametrize("open_again", [opened, compressing])
def test_compressed_upload_is_smaller_and_restores_exactly(
    store: Store, tmp_path: Path, open_again: Callable[[Store, Path], CheckpointManager]
) -> None:
    """The resumed run may have another compression setting."""
    checkpoints = compressing(store, tmp_path)
    save(checkpoints, 1, 2)
    assert_whole((2, tmp_path / "local" / "2"), 2)
    uploaded = {uri.removeprefix(f"{URI}/2/"): store.get_bytes(uri) for uri in store.list(f"{URI}/2")}
    assert uploaded.keys() == {MANIFEST_FILE, *(f"{name}.zst" for name in FILES)}
    assert all(len(uploaded[f"{name}.zst"]) < len(content(2, name)) for name in FILES)
    kept = (tmp_path / "local" / "2" / MANIFEST_FILE).read_bytes()
    shutil.rmtree(tmp_path / "local")
    assert_whole(open_again(store, tmp_path).latest(), 2)
    assert (tmp_path / "local" / "2" / MANIFEST_FILE).read_bytes() == kept


def test_a_compressed_upload_that_is_broken_falls_back(store: Store, tmp_path: Path) -> None:
    save(compressing(store, tmp_path), 1, 2)
    flip(stored(store, 2, "optimizer.pt.zst"), 100)
    shutil.rmtree(tmp_path / "local")
    assert_whole(compressing(store, tmp_path).latest(), 1)


def test_killed_compression_leaves_no_files(store: Store, tmp_path: Path) -> None:
    left = tmp_path / "local" / UPLOAD_FOLDER
    (left / "rng").mkdir(parents=True)
    (left / "rng" / "state.bin.zst").write_bytes(b"half of it")
    (left / "of the last one").write_bytes(b"")
    checkpoints = compressing(store, tmp_path)
    assert checkpoints.latest() is None
    save(checkpoints, 1)
    assert not left.exists() and not any("of the last one" in uri for uri in store.list(URI))
    shutil.rmtree(tmp_path / "local")
    assert_whole(compressing(store, tmp_path).latest(), 1)


class Slow(Store):
    """A store whose uploads complete when the test allows it."""

    def __init__(self, address: StoreAddress) -> None:
        super().__init__(address)
        self.reached, self.released = threading.Event(), threading.Event()

    def put_file(self, uri: str, path: Path) -> None:
        super().put_file(uri, path)
        self.reached.set()
        assert self.released.wait(60)


def test_upload_in_progress_is_invisible_until_its_manifest(store: Store, tmp_path: Path) -> None:
    slow = Slow(store.address)
    checkpoints = opened(slow, tmp_path)
    with checkpoints.save(1) as folder:
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
    assert slow.reached.wait(60)
    assert checkpoints.stored_steps() == []
    slow.released.set()
    checkpoints.wait()
    assert checkpoints.stored_steps() == [1]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_upload_overtaken_by_retention_leaves_no_files(
    store: Store, tmp_path: Path, compression: Literal["zstd"] | None
) -> None:
    """Files without a manifest are invisible to listings, so they would never be deleted."""
    slow = Slow(store.address)
    checkpoints = CheckpointManager(tmp_path / "local", slow, URI, 1, compression)
    for step in (1, 2):
        with checkpoints.save(step) as folder:
            for name in ("a.bin", "b.bin"):
                (folder / name).write_bytes(name.encode())
        assert slow.reached.wait(60)
    slow.released.set()
    checkpoints.wait()
    assert {uri.removeprefix(URI + "/").split("/")[0] for uri in store.list(URI)} == {"2"}


class Late(Slow):
    """Uploads that complete when the test allows it and take long by the clock."""

    def __init__(self, address: StoreAddress, clock: list[float]) -> None:
        super().__init__(address)
        self.clock = clock

    def put_file(self, uri: str, path: Path) -> None:
        super().put_file(uri, path)
        self.clock[0] += SLOW_UPLOAD_SECONDS + 1


def write(checkpoints: CheckpointManager, step: int, loss: float | None = None) -> None:
    with checkpoints.save(step, {} if loss is None else {VALIDATION_LOSS_KEY: loss}) as folder:
        (folder / "a.bin").write_bytes(b"weights")
    checkpoints.wait_for_commit()


def test_slow_uploads_send_the_newest_and_the_best_checkpoint(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: from the fifth on, each checkpoint was removed before its upload finished."""
    now = [0.0]
    monkeypatch.setattr("recipes.checkpoints.remote.time.monotonic", lambda: now[0])
    late = Late(store.address, now)
    checkpoints = opened(late, tmp_path, keep_last=3)
    for step in range(1, 8):
        write(checkpoints, step, loss=0.1 if step == 2 else 0.5)
        if step == 1:
            assert late.reached.wait(60)
    assert checkpoints.local_steps() == [7, 6, 5, 2, 1], "one that is on its way stays until it has arrived"
    late.released.set()
    checkpoints.wait()
    assert checkpoints.stored_steps() == [7, 2, 1] and checkpoints.local_steps() == [7, 6, 5, 2]
    said = capsys.readouterr().out
    assert [step for step in range(1, 8) if f"checkpoint {step} was not uploaded" in said] == [3, 4, 5, 6]
    write(checkpoints, 8)
    checkpoints.wait()
    assert checkpoints.local_steps() == [8, 7, 6, 2] and checkpoints.stored_steps() == [8, 7, 2]


def test_best_of_a_rewound_run_may_precede_its_branch(store: Store, tmp_path: Path) -> None:
    first = opened(store, tmp_path)
    for step, loss in ((1, 0.9), (2, 0.3), (3, 0.2)):
        write(first, step, loss)
    way = first.branch("from-2", 2)
    for step, loss in ((3, 0.5), (4, 0.6)):
        write(way, step, loss)
        way.wait()
    first.wait()
    for _ in ("here", "on another machine"):
        best = way.best()
        assert best is not None and best == (2, first.folder / "2") and way.best_step() == 2
        shutil.rmtree(tmp_path / "local")
    write(way, 5, 0.1)
    assert way.best() == (5, way.folder / "5")
    shutil.rmtree(tmp_path / "local")


def test_best_step_is_known_without_fetching(store: Store, tmp_path: Path) -> None:
    checkpoints = opened(store, tmp_path)
    write(checkpoints, 1, 0.4)
    write(checkpoints, 2, 0.6)
    checkpoints.wait()
    shutil.rmtree(tmp_path / "local")
    elsewhere = opened(store, tmp_path)
    assert elsewhere.best_step() == 1 and elsewhere.local_steps() == []


class Flaky(Store):
    """A store that fails a number of times on the files of one step."""

    def __init__(self, address: StoreAddress, step: int, times: int) -> None:
        super().__init__(address)
        self._fails_on, self._times = f"{URI}/{step}/", times

    def put_file(self, uri: str, path: Path) -> None:
        if uri.startswith(self._fails_on) and self._times:
            self._times -= 1
            raise ConnectionError("the store did not answer")
        super().put_file(uri, path)


@pytest.mark.parametrize(("step", "times"), [(1, 1), (2, 1), (2, 2)])
def test_failed_upload_is_retried_and_does_not_end_the_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, times: int
) -> None:
    """After training, every checkpoint that should be stored is stored despite brief network errors."""
    paused: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", paused.append)
    save(opened(Flaky(store.address, step, times), tmp_path), 1, 2)
    assert opened(store, tmp_path).stored_steps() == [2, 1]
    assert paused == [1.0, 4.0][:times]


def test_best_checkpoint_is_uploaded_after_a_long_outage(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: the best checkpoint stayed on one machine, whose loss would have published another one.

    The store accepts checkpoint 2 but fails for checkpoint 1 again, which is then uploaded with checkpoint 3.
    """
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    checkpoints = opened(Flaky(store.address, step=1, times=4), tmp_path, keep_last=1)
    write(checkpoints, 1, 0.1)
    with pytest.raises(ConnectionError):
        checkpoints.wait()
    for step, arrived in ((2, [2]), (3, [3, 1])):
        write(checkpoints, step, 0.5)
        checkpoints.wait()
        assert checkpoints.stored_steps() == arrived
        assert ("upload of checkpoint 1 failed again: ConnectionError" in capfd.readouterr().out) == (step == 2)


def test_metadata_updated_during_an_outage_is_uploaded_with_its_checkpoint(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation loss follows later than the files, and determines the best checkpoint."""
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    checkpoints = opened(Flaky(store.address, step=1, times=3), tmp_path)
    write(checkpoints, 1)
    with pytest.raises(ConnectionError):
        checkpoints.wait()
    checkpoints.update_metadata(1, {VALIDATION_LOSS_KEY: 0.1})
    checkpoints.wait()
    assert checkpoints.stored_steps() == [1]
    assert checkpoints.stored.quality(1).loss == 0.1


def test_failed_deletion_of_old_checkpoints_does_not_end_the_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save(opened(store, tmp_path), 4)
    halves(store, 3)

    def away(*given: Any) -> None:
        raise ConnectionError("the store did not answer")

    again = opened(store, tmp_path)
    monkeypatch.setattr(again.stored, "delete", away)
    again.upload_missing()
    again.wait()
    assert "old checkpoints were not deleted: ConnectionError" in capfd.readouterr().out


@pytest.mark.parametrize("is_whole", [True, False])
def test_missing_best_checkpoint_is_uploaded_on_resume_if_intact(store: Store, tmp_path: Path, is_whole: bool) -> None:
    first = opened(store, tmp_path, keep_last=1)
    write(first, 1, 0.1)
    write(first, 2, 0.5)
    first.wait()
    store.delete(f"{URI}/1")
    if not is_whole:
        (tmp_path / "local" / "1" / "a.bin").write_bytes(b"weight")
    again = opened(store, tmp_path, keep_last=1)
    again.upload_missing()
    again.wait()
    assert again.stored_steps() == ([2, 1] if is_whole else [2])


def halves(store: Store, *steps: int) -> None:
    """Create what an interrupted upload or deletion leaves in the store."""
    for step in steps:
        store.put_bytes(f"{URI}/{step}/optimizer.pt", b"moments")


def steps_in(store: Store) -> set[str]:
    """Return all step folders in the store, complete or not."""
    return {uri.removeprefix(URI + "/").split("/")[0] for uri in store.list(URI)}


def test_partial_uploads_and_deletions_are_cleaned_after_next_upload(store: Store, tmp_path: Path) -> None:
    """Outages leave files without a manifest, which no listing of checkpoints shows."""
    save(opened(store, tmp_path, keep_last=1), 4)
    halves(store, 1, 3)
    store.put_bytes(f"{URI}/from-3/2/optimizer.pt", b"of another way of the run")
    save(opened(store, tmp_path, keep_last=1), 5)
    assert steps_in(store) == {"5", "from-3"}


def test_partial_deletions_are_cleaned_without_a_new_upload(store: Store, tmp_path: Path) -> None:
    """The run was killed while it deleted the checkpoint replaced by its last one."""
    save(opened(store, tmp_path, keep_last=1), 4)
    halves(store, 3)
    (tmp_path / "local" / "3").mkdir()
    (tmp_path / "local" / "3" / "optimizer.pt").write_bytes(b"moments")
    again = opened(store, tmp_path, keep_last=1)
    again.upload_missing()
    again.wait()
    assert steps_in(store) == {"4"} and again.local_steps() == [4]
    assert_whole(again.latest(), 4)


def test_permanently_failed_upload_of_the_newest_ends_the_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    with pytest.raises(ConnectionError, match="the store did not answer"):
        save(opened(Flaky(store.address, step=2, times=3), tmp_path), 1, 2)
    assert opened(store, tmp_path).stored_steps() == [1]
    assert_whole(opened(store, tmp_path).latest(), 2)


def test_discarded_checkpoint_is_not_uploaded_afterwards(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run resumed from the store would start from a diverged step's weights."""
    put, begun, held = Store.put_manifest, threading.Event(), threading.Event()

    def hold(self: Store, uri: str, manifest: Manifest) -> Artifact:
        begun.set()
        held.wait()
        return put(self, uri, manifest)

    monkeypatch.setattr(Store, "put_manifest", hold)
    run = opened(store, tmp_path)
    with run.save(4) as folder:
        (folder / "optimizer.pt").write_bytes(b"moments")
    begun.wait()
    threading.Timer(0.2, held.set).start()
    run.discard_from(4)
    run.wait()
    assert (run.local_steps(), run.stored_steps()) == ([], [])


def test_corrupt_upload_does_not_displace_a_valid_one(store: Store, tmp_path: Path) -> None:
    save(opened(store, tmp_path, keep_last=1), 8)
    os.truncate(stored(store, 8, "optimizer.pt"), 5)
    os.truncate(tmp_path / "local" / "8" / "optimizer.pt", 5)
    resumed = opened(store, tmp_path, keep_last=1)
    assert resumed.latest() is None
    save(resumed, 6)  # stopped before it reached step 8 again
    shutil.rmtree(tmp_path / "local")
    assert_whole(opened(store, tmp_path, keep_last=1).latest(), 6)


FULL_DISK = """
import resource, sys
from pathlib import Path
from recipes.checkpoints.manager import CheckpointManager
from recipes.runner import main
from recipes.contracts.job import Result

def program(job, store, work):
    checkpoints = CheckpointManager(work / "checkpoints", store, job.outputs["checkpoints"], 3)
    with checkpoints.save(1) as folder:
        (folder / "weights.bin").write_bytes(b"x" * 1000)
    checkpoints.wait()
    if sys.argv[2] == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
    with checkpoints.save(2) as folder:
        how = job.parameters["how"]
        if how == "file":
            (folder / "weights.bin").write_bytes(b"x" * 4_000_000)
        elif how == "safetensors":
            import numpy
            from safetensors.numpy import save_file
            save_file({"weights": numpy.ones(1_000_000, dtype="float32")}, folder / "weights.safetensors")
        elif how == "torch":
            import torch
            torch.save({"weights": torch.ones(1_000_000)}, folder / "optimizer.pt")
    return Result(work_digest=job.work_digest)

main(program)
"""
IN_A_SMALL_DISK = """
mount -t tmpfs -o size=1m tmpfs "$1" || exit 99
"$2" -c "$3" "$4" mounted
code=$?
cp -r "$1"/. "$5"
exit $code
"""


def run_on_a_full_disk(job: Job, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run FULL_DISK on a 1 MB disk, or without mount permission with 500 kB files."""
    (tmp_path / "job.json").write_text(job.model_dump_json())
    disk, kept = Path(job.work_dir), tmp_path / "kept"
    disk.mkdir()
    kept.mkdir()
    if shutil.which("unshare"):
        script = [
            "sh",
            "-c",
            IN_A_SMALL_DISK,
            "sh",
            str(disk),
            sys.executable,
            FULL_DISK,
            str(tmp_path / "job.json"),
            str(kept),
        ]
        done = subprocess.run(["unshare", "-rm", *script], cwd=ROOT, capture_output=True, text=True, check=False)
        if (kept / "checkpoints").is_dir():
            return done
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "job.json"), "limited"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    shutil.copytree(disk, kept, dirs_exist_ok=True)
    return done


@pytest.mark.parametrize("how", ["file", "safetensors", "torch"])
def test_full_disk_keeps_the_previous_checkpoint_and_logs_one_line(store: Store, tmp_path: Path, how: str) -> None:
    """The trainer's libraries write the files; each has its own error for a full disk."""
    job = Job(
        id="full",
        program=Program.TRAIN,
        parameters={"how": how},
        outputs={"checkpoints": URI},
        result_uri="s3://hanzo-ml/runs/full/train.json",
        store=store.address,
        work_dir=str(tmp_path / "disk"),
        cache_dir=str(tmp_path / "cache"),
    )
    done = run_on_a_full_disk(job, tmp_path)
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "free some space" in errors[0], done.stderr
    assert json.loads((tmp_path / "kept" / "exit.json").read_text())["message"] == errors[0].removeprefix("error: ")
    checkpoints = CheckpointManager(tmp_path / "kept" / "checkpoints", store, URI, 3)
    assert checkpoints.local_steps() == checkpoints.stored_steps() == [1]
    found = checkpoints.latest()
    assert found is not None and (found[1] / "weights.bin").read_bytes() == b"x" * 1000


@pytest.mark.parametrize("open_again", [opened, compressing])
def test_metadata_added_later_counts_locally_and_on_another_machine(
    store: Store, tmp_path: Path, open_again: Callable[[Store, Path], CheckpointManager]
) -> None:
    """The validation loss is known only after a resumed run has evaluated the checkpoint."""
    checkpoints = open_again(store, tmp_path)
    save(checkpoints, 1, 2, 3)
    checkpoints.update_metadata(2, {VALIDATION_LOSS_KEY: 1.5})
    checkpoints.update_metadata(7, {VALIDATION_LOSS_KEY: 0.5})  # does not exist
    checkpoints.wait()
    assert_whole(checkpoints.best(), 2)
    shutil.rmtree(tmp_path / "local")
    assert_whole(open_again(store, tmp_path).best(), 2)
    assert open_again(store, tmp_path).stored_steps() == [3, 2, 1]
