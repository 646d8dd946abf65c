"""Publishing a running command's files: consistent snapshots, never overwriting an earlier state."""

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

from recipes.command import snapshot_copy, snapshot_publisher
from recipes.command.folder_scan import find_changed_files, scan_folder
from recipes.command.snapshot_publisher import SnapshotPublisher, seconds_until_scan
from recipes.command.snapshot_store import SnapshotStore
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import MANIFEST_FILE, Store, hash_file
from recipes.storage.buckets import StoreFull, StoreUnavailable
from recipes.storage.manifest import Manifest
from tests.support.recipes.observed_store import PLACE, Small, Watched


class Machine:
    """A folder of checkpoints and its publisher, which scans only on request."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.folder = folder / "checkpoints"
        self.folder.mkdir(parents=True)
        self.states = SnapshotStore(store, PLACE, keep_last=2)
        self.saving = SnapshotPublisher(self.folder, self.states, Manifest(kind="checkpoints", files=()), 0.0, lambda: None)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def replace(self, name: str, text: str) -> None:
        self.write(f"{name}.tmp", text)
        (self.folder / f"{name}.tmp").rename(self.folder / name)

    def looks(self, times: int = 2) -> None:
        for _ in range(times):
            self.saving.scan_once()


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def refuse_link(target: Path, source: Path) -> None:
    raise PermissionError(errno.EPERM, "no links here")


def brought(store: Store, folder: Path) -> dict[str, str]:
    """Return the files that a new machine starts with."""
    (folder / "checkpoints").mkdir(parents=True)
    SnapshotStore(store, PLACE, keep_last=2).restore_newest(folder / "cache", folder / "checkpoints")
    return {path.name: path.read_text() for path in (folder / "checkpoints").iterdir()}


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "objects")


@pytest.fixture
def machine(store: Watched, tmp_path: Path) -> Machine:
    return Machine(store, tmp_path / "first")


def test_quiet_folder_is_published_once(machine: Machine, store: Watched, tmp_path: Path) -> None:
    machine.write("a", "1")
    machine.looks(1)
    assert store.sent == [], "it may be half written"
    machine.write("a", "12")
    machine.looks(1)
    assert store.sent == []
    machine.looks(3)
    assert store.sent == ["a"]
    assert brought(store, tmp_path / "other") == {"a": "12"}
    assert machine.saving.publish() == machine.states.newest(), "what it ends with is there already"
    assert store.sent == ["a"]


def test_unchanged_files_are_not_sent_again_and_last_states_are_kept(
    machine: Machine, store: Watched, tmp_path: Path
) -> None:
    machine.write("base", "b")
    for step in range(4):
        machine.replace("step", str(step))
        machine.looks()
    assert store.sent == ["base", "step", "step", "step", "step"]
    states = {uri.removeprefix(f"{PLACE}/").split("/")[0] for uri in store.list(PLACE)}
    assert sorted(state.rpartition("-")[0] for state in states) == ["state-3", "state-4"]
    assert brought(store, tmp_path / "other") == {"base": "b", "step": "3"}


def test_killed_upload_leaves_the_previous_state(machine: Machine, store: Watched, tmp_path: Path) -> None:
    """Regression: new files overwrote the previous state, so a half finished upload lost both."""
    machine.write("a", "1")
    machine.write("b", "1")
    machine.looks()
    machine.write("a", "2")
    machine.write("b", "2")

    def kill() -> None:
        raise KeyboardInterrupt

    store.then["a"] = kill
    with pytest.raises(KeyboardInterrupt):
        machine.looks()
    assert brought(store, tmp_path / "other") == {"a": "1", "b": "1"}
    after = Machine(store, tmp_path / "third")
    after.write("a", "3")
    after.looks()
    assert brought(store, tmp_path / "fourth") == {"a": "3"}
    assert len([uri for uri in store.list(PLACE) if uri.endswith(MANIFEST_FILE)]) == 2
    assert len({uri.rpartition("/")[0] for uri in store.list(PLACE)}) == 2, "what never became a state is gone"


def folders(store: Store) -> list[str]:
    """List the numbers of state folders, including incomplete ones."""
    names = {uri.removeprefix(f"{PLACE}/").split("/")[0] for uri in store.list(PLACE)}
    return sorted(name.rpartition("-")[0] for name in names)


def test_failed_uploads_leave_only_the_last_partial_state(machine: Machine, store: Watched, tmp_path: Path) -> None:
    """Regression: each failed attempt, one a minute, left its files until one succeeded."""

    def fail() -> None:
        raise StoreUnavailable("no answer")

    machine.write("a", "1")
    machine.write("b", "1")
    machine.looks()
    machine.replace("a", "2")
    for step in ("2", "3", "4"):
        machine.replace("b", f"b{step}")
        store.then["b"] = fail
        with pytest.raises(StoreUnavailable):
            machine.looks()
    assert folders(store) == ["state-1", "state-4"]
    assert brought(store, tmp_path / "other") == {"a": "1", "b": "1"}
    machine.looks(1)
    assert folders(store) == ["state-1", "state-5"]
    assert store.sent.count("a") == 2, "the try that failed had sent it"


def test_full_store_deletes_older_states_for_the_final_one(store: Watched, tmp_path: Path) -> None:
    """Regression: a successful command failed because obsolete states filled the store."""
    machine = Machine(Small(tmp_path / "objects", size=30), tmp_path / "first")
    for letter in "xyz":
        machine.replace("step", letter * 10)
        machine.looks()
    assert folders(store) == ["state-2", "state-3"]
    machine.replace("step", "last" * 4)
    with pytest.raises(StoreFull):
        machine.looks()
    assert folders(store) == ["state-2", "state-3"], "while the command runs"
    assert machine.saving.publish() == machine.states.newest()
    assert folders(store) == ["state-3", "state-4"]
    assert brought(store, tmp_path / "other") == {"step": "last" * 4}
    machine.replace("step", "larger" * 9)
    with pytest.raises(StoreFull):
        machine.saving.publish()
    assert brought(store, tmp_path / "third") == {"step": "last" * 4}


def test_corrupt_state_falls_back_to_the_previous_one(machine: Machine, store: Watched, tmp_path: Path) -> None:
    for text in ("1", "2"):
        machine.write("a", text)
        machine.looks()
    newest = machine.states.newest()
    assert newest is not None
    store.put_bytes(f"{newest.uri}/a", b"half")
    assert brought(store, tmp_path / "other") == {"a": "1"}


@pytest.mark.parametrize("changed", [False, True])
def test_corrupt_stored_file_is_not_reused_for_a_new_state(
    machine: Machine, store: Watched, tmp_path: Path, changed: bool
) -> None:
    """Regression: it was copied under the SHA-256 of the intact local file."""
    machine.write("base", "good")
    machine.looks()
    first = machine.states.newest()
    assert first is not None
    store.put_bytes(f"{first.uri}/base", b"bad")
    after = Machine(store, tmp_path / "after")
    after.write("base", "good")
    if changed:
        after.write("step", "1")
    made = after.saving.publish()
    assert made is not None and made.uri != first.uri
    assert store.get_bytes(f"{made.uri}/base") == b"good"


def test_unchanged_state_of_another_process_is_not_published_again(machine: Machine, store: Watched, tmp_path: Path) -> None:
    machine.write("base", "good")
    machine.looks()
    after = Machine(store, tmp_path / "after")
    after.write("base", "good")
    assert after.saving.publish() == machine.states.newest()
    assert store.sent == ["base"]


def test_states_in_a_folder_share_no_file(tmp_path: Path) -> None:
    """With shared files, one damaged file would corrupt all states."""
    store = Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets={"checkpoints": "checkpoints"}))
    machine = Machine(store, tmp_path / "first")
    machine.write("base", "good")
    for step in range(2):
        machine.replace("step", str(step))
        machine.looks()
    newest = machine.states.newest()
    assert newest is not None
    damaged = store.local_path(f"{newest.uri}/base")
    assert damaged is not None
    damaged.write_text("bad")
    assert brought(store, tmp_path / "other") == {"base": "good", "step": "0"}


@pytest.mark.parametrize("way", ["write", "replace"])
def test_file_changing_during_upload_makes_no_mixed_state(
    machine: Machine, store: Watched, tmp_path: Path, way: str
) -> None:
    """An overwritten file is uploaded again from a copy; a replaced one keeps its content."""
    machine.write("a", "1")
    machine.write("b", "1")
    rewrite = {"write": machine.write, "replace": machine.replace}[way]

    def step() -> None:
        for name in ("a", "b"):
            rewrite(name, "22")

    store.then["a"] = step
    try:
        machine.looks()
    except snapshot_publisher.FilesChanged as moved:
        machine.saving.rewritten |= moved.rewritten
    expected = {} if way == "write" else {"a": "1", "b": "1"}
    assert brought(store, tmp_path / "other") == expected
    machine.looks()
    assert brought(store, tmp_path / "third") == {"a": "22", "b": "22"}


def test_files_are_copied_once_when_hard_links_fail(
    machine: Machine, store: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another file system. Regression: copies counted as changed links and restarted the snapshot."""
    tried: list[str] = []

    def refuse(target: Path, source: Path) -> None:
        tried.append(target.name)
        refuse_link(target, source)

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    for name in "abcd":
        machine.write(name, name)
    machine.saving.publish()
    assert sorted(tried) == store.sent == list("abcd")
    assert brought(store, tmp_path / "other") == {name: name for name in "abcd"}


def test_files_that_are_written_over_together_are_copied_together(machine: Machine, store: Watched) -> None:
    """Regression: files were found one by one, which took one attempt per file."""
    for name in "abcd":
        machine.write(name, "1")

    def step() -> None:
        for name in "abcd":
            machine.write(name, "22")

    store.then["a"] = step
    with pytest.raises(snapshot_publisher.FilesChanged) as moved:
        machine.looks()
    assert moved.value.rewritten == set("abcd")


def test_unreadable_file_is_skipped_and_logged_once(
    machine: Machine, store: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: no state was published, and a successful command failed."""

    def read(path: Path) -> str:
        if path.name == "key":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return hash_file(path)

    monkeypatch.setattr(snapshot_copy, "hash_file", read)  # root, which runs the tests, may read every file
    for name in ("key", "step"):
        machine.write(name, name)
    machine.looks()
    machine.saving.publish()
    assert brought(store, tmp_path / "other") == {"step": "step"}
    said = f"checkpoints: {machine.folder}/key is not published: Permission denied"
    assert capsys.readouterr().out.count(said) == 1


def test_a_copy_that_would_fill_the_disk_is_not_made_while_the_command_runs(
    machine: Machine, store: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the command's own write fails, and a full disk is not retried."""
    tries: list[Path] = []
    third = threading.Event()

    def disk(folder: Path) -> Disk:
        tries.append(folder)
        if len(tries) == 3:
            third.set()
        return Disk(total=100, used=80, free=20)

    monkeypatch.setattr(shutil, "disk_usage", disk)
    machine.write("log", "x" * 9)
    machine.write("weights", "x" * 11)
    machine.saving.rewritten = frozenset({"log", "weights"})
    machine.saving.begin()
    assert third.wait(60)
    machine.saving.end()
    said = "not published while the command runs, for want of space for a copy of weights"
    assert capsys.readouterr().out.count(said) == 1
    assert store.sent == []
    monkeypatch.setattr(Path, "hardlink_to", refuse_link)
    assert machine.saving.publish() is not None, "it needs no room once it has ended"
    assert brought(store, tmp_path / "other") == {"log": "x" * 9, "weights": "x" * 11}


def test_copies_that_leave_a_tenth_of_the_disk_are_made(
    machine: Machine, store: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(total=100, used=80, free=20))
    machine.write("log", "x" * 9)
    machine.write("step", "x")
    machine.saving.rewritten = frozenset({"log", "step"})
    machine.looks()
    assert store.sent == ["log", "step"]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(total=10_000, used=9_000, free=1_000))
    machine.write("log", "y" * 9)
    machine.looks()
    assert store.sent == ["log", "step", "log"], "of what is left some bytes can be spared"


def test_busy_folder_is_published_after_quiet_timeout(
    machine: Machine, store: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_publisher, "QUIET_TIMEOUT_SECONDS", -1.0)
    machine.write("step", "1")
    machine.write("log", "one\n")
    store.then["log"] = lambda: machine.write("log", "one\ntwo\n")
    machine.looks(1)
    assert brought(store, tmp_path / "other") == {"step": "1", "log": "one\n"}


def test_upload_continues_after_a_store_outage(machine: Machine, store: Watched, tmp_path: Path) -> None:
    def fail() -> None:
        raise StoreUnavailable("no answer")

    for name in ("a", "b"):
        machine.write(name, name)
    store.then["b"] = fail
    with pytest.raises(StoreUnavailable):
        machine.saving.publish()
    assert brought(store, tmp_path / "other") == {}
    assert machine.saving.publish() == machine.states.newest() is not None
    assert store.sent == ["a", "b", "b"], "what had arrived is not sent again"
    assert brought(store, tmp_path / "third") == {"a": "a", "b": "b"}
    assert not (machine.folder.parent / ".checkpoints.taken").exists()


def test_command_ending_during_upload_publishes_final_state_without_resending(
    machine: Machine, store: Watched, tmp_path: Path
) -> None:
    sending = threading.Event()

    def hold() -> None:
        sending.set()
        assert machine.saving._ended.wait(60)

    machine.write("a", "a")
    machine.write("b", "b")
    store.then["a"] = hold
    machine.saving.begin()
    assert sending.wait(60)
    machine.write("b", "the last")
    machine.saving.end()
    assert machine.states.newest() is None, "one that never was whole"
    machine.saving.publish()
    assert store.sent == ["a", "b"]
    assert brought(store, tmp_path / "other") == {"a": "a", "b": "the last"}


def test_command_ending_during_scan_waits_for_at_most_one_file(
    machine: Machine, store: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: all files were read for a state that was then discarded."""
    read: list[str] = []

    def end(path: Path) -> str:
        read.append(path.name)
        machine.saving.end()
        return hash_file(path)

    monkeypatch.setattr(snapshot_copy, "hash_file", end)
    for name in "abc":
        machine.write(name, name)
    with pytest.raises(snapshot_publisher.CommandEnded):
        machine.looks()
    assert (read, store.sent) == (["a"], [])


def test_folder_is_scanned_only_shortly_before_a_state_is_due() -> None:
    assert seconds_until_scan(now=0, due=3600, accounts_at=3600, interval=3600) == 3590
    assert seconds_until_scan(now=0, due=3600, accounts_at=1200, interval=3600) == 1200, (
        "what it used is written down as often"
    )
    assert seconds_until_scan(now=3590, due=3600, accounts_at=3600, interval=3600) == 5
    assert seconds_until_scan(now=4000, due=3600, accounts_at=7200, interval=3600) == 5, "nothing had changed, or all moved"
    assert seconds_until_scan(now=0, due=2, accounts_at=2, interval=2) == 1


def test_store_error_is_logged_and_publishing_continues(
    machine: Machine, store: Watched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The publishing thread logs the error and retries."""
    again = threading.Event()

    def fail() -> None:
        store.then["a"] = again.set
        raise StoreUnavailable("no answer")

    machine.write("a", "1")
    store.then["a"] = fail
    machine.saving.begin()
    assert again.wait(60)
    machine.saving.end()
    assert "checkpoints: not published, StoreUnavailable: no answer" in capsys.readouterr().out


def test_scan_handles_links_reserved_names_and_deleted_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_text("1")
    (tmp_path / MANIFEST_FILE).write_text("mine")
    (tmp_path / "newest").symlink_to("deep/a")
    (tmp_path / "folder").symlink_to("deep")
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "itself").symlink_to("itself")
    os.mkfifo(tmp_path / "pipe")
    seen = scan_folder(tmp_path)
    assert set(seen) == {"deep", "deep/a", MANIFEST_FILE, "newest", "folder", "nowhere", "itself"}, "a pipe is no file"
    (tmp_path / "deep" / "a").unlink()
    assert find_changed_files(seen, scan_folder(tmp_path)) == frozenset()
