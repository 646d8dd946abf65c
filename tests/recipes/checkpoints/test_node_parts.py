"""Checkpoints saved by several nodes: complete with the last part, never mixing saves."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest

from recipes.checkpoints.commit import find_corruption, read_content_digest
from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import PARTS_FOLDER, CheckpointPart, part_in_folder
from recipes.contracts.job import StoreAddress
from recipes.runner import Restart
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.manifest import Manifest
from tests.support.recipes.checkpoint_parts import URI, of, rows_in, save, write
from tests.support.s3_server import VARIABLES, S3Server


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        s3: S3Server = request.getfixturevalue("s3")
        return Store(s3.address, VARIABLES)
    return Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets={"checkpoints": "c"}))


def machines(
    store: Store, tmp_path: Path, of: int = 2, compression: Literal["zstd"] | None = None
) -> list[CheckpointManager]:
    return [CheckpointManager(tmp_path / f"machine-{number}", store, URI, 3, compression) for number in range(1, of + 1)]


@pytest.mark.requirement("Z16")
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_checkpoint_is_complete_with_the_last_part_in_any_upload_order(
    store: Store, tmp_path: Path, order: tuple[int, ...]
) -> None:
    together = machines(store, tmp_path, 3)
    for place in order:
        assert together[0].stored_steps() == []
        write(together[place], 6, CheckpointPart(number=place + 1, of=3, save="save-6"))
        together[place].wait()
    assert together[0].stored_steps() == [6]
    another = CheckpointManager(tmp_path / "another", store, URI, 3)
    found = another.latest()
    assert found and found[0] == 6 and find_corruption(found[1], 6) is None
    assert rows_in(found[1]) == of(6, 3)
    facts = Manifest.model_validate_json((found[1] / MANIFEST_FILE).read_bytes()).facts
    assert facts == {"samples_seen": 48, "step": 6}
    assert not any(f"/{PARTS_FOLDER}/" in uri for uri in store.list(URI)), "the manifests of the parts are gone"


def test_simultaneous_part_uploads_make_one_complete_checkpoint(store: Store, tmp_path: Path) -> None:
    together = machines(store, tmp_path)

    def bring(number: int, step: int) -> None:
        write(together[number - 1], step, CheckpointPart(number=number, of=2, save=f"save-{step}"))
        together[number - 1].wait()

    for step in range(1, 13):
        with ThreadPoolExecutor(2) as both:
            list(both.map(bring, (1, 2), (step, step)))
        assert step in together[0].stored_steps()
        assert not any(f"/{PARTS_FOLDER}/" in uri for uri in store.list(f"{URI}/{step}"))


@pytest.mark.requirement("Z16")
def test_machine_keeps_only_its_own_part_locally(store: Store, tmp_path: Path) -> None:
    first, second = machines(store, tmp_path)
    save([first, second], 6)
    assert (rows_in(first.folder / "6"), rows_in(second.folder / "6")) == (
        {"rows-1": "1 of 6, save-6"},
        {"rows-2": "2 of 6, save-6"},
    )


def test_parts_of_different_saves_are_not_combined(store: Store, tmp_path: Path) -> None:
    """The step was reached again after one machine had uploaded its first part."""
    first, second = machines(store, tmp_path)
    write(second, 6, CheckpointPart(number=2, of=2, save="save-6"))
    second.wait()
    write(first, 6, CheckpointPart(number=1, of=2, save="b"))
    first.wait()
    assert first.stored_steps() == []
    write(second, 6, CheckpointPart(number=2, of=2, save="b"))
    second.wait()
    found = CheckpointManager(tmp_path / "another", store, URI, 3).latest()
    assert found and rows_in(found[1]) == of(6, save="b")


def test_parts_of_another_machine_count_are_not_combined(store: Store, tmp_path: Path) -> None:
    first, second = machines(store, tmp_path)
    write(first, 6, CheckpointPart(number=1, of=3, save="a"))
    write(second, 6, CheckpointPart(number=2, of=3, save="a"))
    first.wait()
    second.wait()
    assert first.stored_steps() == []


@pytest.mark.requirement("I15")
def test_incomplete_parts_fall_back_to_previous_checkpoint(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = machines(store, tmp_path)
    save([first, second], 4)
    write(first, 6, CheckpointPart(number=1, of=2, save="save-6"))
    first.wait()
    found = first.latest()
    assert found and found[0] == 4 and rows_in(found[1]) == of(4)
    assert "checkpoint 6 is a part whose other parts are not in the store: falling back" in capsys.readouterr().out
    assert part_in_folder(first.folder / "4") is None, "it was completed"
    assert part_in_folder(first.folder / "6"), "another machine may bring the rest"


def test_restore_fetches_only_the_missing_parts(s3: S3Server, tmp_path: Path) -> None:
    together = machines(Store(s3.address, VARIABLES), tmp_path)
    save(together, 6)
    s3.requests.clear()
    found = together[1].latest()
    assert found and rows_in(found[1]) == of(6)
    asked = {each.path.rpartition("/")[2] for each in s3.requests if each.method == "GET"}
    assert "rows-1" in asked and "rows-2" not in asked


@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_corrupt_local_part_is_repaired_from_the_store(store: Store, tmp_path: Path, how: str) -> None:
    together = machines(store, tmp_path)
    save(together, 6)
    file = together[1].folder / "6" / "rows-2"
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    found = together[1].latest()
    assert found and rows_in(found[1]) == of(6) and find_corruption(found[1], 6) is None


def test_each_machine_compresses_its_own_part(store: Store, tmp_path: Path) -> None:
    together = machines(store, tmp_path, compression="zstd")
    save(together, 6)
    assert {uri.rpartition("/")[2] for uri in store.list(f"{URI}/6")} == {
        "manifest.json", "rows-1.zst", "rows-2.zst", "schedule.zst",
    }  # fmt: skip
    for checkpoints in (*together, CheckpointManager(tmp_path / "another", store, URI, 3)):
        found = checkpoints.latest()
        assert found and rows_in(found[1]) == of(6) and find_corruption(found[1], 6) is None


def test_pruning_keeps_parts_still_being_uploaded(store: Store, tmp_path: Path) -> None:
    """One machine prunes for all and finishes before the others."""
    first, second = machines(store, tmp_path)
    for step in (2, 4, 6):
        write(first, step, CheckpointPart(number=1, of=2, save=f"save-{step}"))
    first.wait()
    for step in (2, 4, 6):
        write(second, step, CheckpointPart(number=2, of=2, save=f"save-{step}"))
    second.wait()
    assert first.stored_steps() == [6, 4, 2]


def test_pruning_keeps_parts_uploaded_before_the_first_machine(store: Store, tmp_path: Path) -> None:
    """Regression: the first machine, still writing its part, pruned the faster machine's as abandoned."""
    first, second = machines(store, tmp_path)
    save([first, second], 4)
    write(second, 6, CheckpointPart(number=2, of=2, save="save-6"))
    second.wait()
    first.stored.prune()
    first.wait()
    write(first, 6, CheckpointPart(number=1, of=2, save="save-6"))
    first.wait()
    found = CheckpointManager(tmp_path / "another", store, URI, 3).latest()
    assert found and rows_in(found[1]) == of(6)


def test_pruning_keeps_own_parts_waiting_for_a_slower_machine(store: Store, tmp_path: Path) -> None:
    """Regression: a machine keeping only its newest part never matched a slower machine's step."""
    first, second = (CheckpointManager(tmp_path / name, store, URI, 1) for name in ("first", "second"))
    for step in (4, 6, 8):
        write(first, step, CheckpointPart(number=1, of=2, save=f"save-{step}"))
        first.wait()
    write(second, 4, CheckpointPart(number=2, of=2, save="save-4"))
    second.wait()
    assert first.stored_steps() == [4]


def test_incomplete_parts_are_deleted_when_retention_expires(store: Store, tmp_path: Path) -> None:
    first, second = machines(store, tmp_path)
    write(first, 2, CheckpointPart(number=1, of=2, save="save-2"))
    for step in (4, 6, 8, 10):
        save([first, second], step)
    assert not store.list(f"{URI}/2") and first.stored_steps() == [10, 8, 6, 4]
    first.require_complete_parts()
    first.wait()
    assert first.stored_steps() == [10, 8, 6]


def test_run_end_requires_all_parts(store: Store, tmp_path: Path) -> None:
    first, second = machines(store, tmp_path)
    save([first, second], 4, loss=1.0)
    first.require_complete_parts()
    write(first, 6, CheckpointPart(number=1, of=2, save="save-6"))
    first.wait()
    with pytest.raises(Restart, match="not all machines' parts of checkpoint 6 have arrived in the store"):
        first.require_complete_parts()
    write(second, 6, CheckpointPart(number=2, of=2, save="save-6"))
    second.wait()
    first.require_complete_parts()


def test_discarding_deletes_already_uploaded_parts(store: Store, tmp_path: Path) -> None:
    first, second = machines(store, tmp_path)
    save([first, second], 4)
    write(first, 6, CheckpointPart(number=1, of=2, save="save-6"))
    first.wait()
    first.discard_from(5)
    assert not store.list(f"{URI}/6") and first.local_steps() == [4]
    write(second, 6, CheckpointPart(number=2, of=2, save="save-6"))
    second.wait()
    assert first.stored_steps() == [4]


def test_machine_completes_its_local_part_to_the_checkpoint_of_the_first(store: Store, tmp_path: Path) -> None:
    first, second = machines(store, tmp_path)
    save([first, second], 6)
    found = first.latest()
    assert found
    before = (second.folder / "6" / "rows-2").stat().st_ino
    second.ensure_local(6, read_content_digest(found[1]))
    assert rows_in(second.folder / "6") == of(6)
    if store.local_path(URI) is None:  # a folder store copies the file instead
        assert (second.folder / "6" / "rows-2").stat().st_ino == before


def test_simultaneous_last_parts_both_complete_the_checkpoint(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both see all parts before either has completed the checkpoint."""
    together, both = machines(store, tmp_path), threading.Barrier(2)
    written = Store.put_manifest

    def waits(self: Store, uri: str, manifest: Manifest) -> object:
        both.wait(30)
        return written(self, uri, manifest)

    monkeypatch.setattr(Store, "put_manifest", waits)
    listed = Store.list

    def after_both(self: Store, uri: str) -> list[str]:
        if uri.endswith(PARTS_FOLDER) and threading.current_thread().name.startswith("checkpoint-upload"):
            both.wait(30)
        return listed(self, uri)

    monkeypatch.setattr(Store, "list", after_both)
    for number, checkpoints in enumerate(together, 1):
        write(checkpoints, 6, CheckpointPart(number=number, of=2, save="save-6"))
    for checkpoints in together:
        checkpoints.wait()
    monkeypatch.setattr(Store, "list", listed)
    assert together[0].stored_steps() == [6]
    found = CheckpointManager(tmp_path / "another", store, URI, 3).latest()
    assert found and rows_in(found[1]) == of(6)


def test_slow_machines_upload_the_same_steps(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each uploaded its own newest step, so only the first checkpoint was ever complete."""
    together = machines(store, tmp_path)
    monkeypatch.setattr("recipes.checkpoints.remote.SLOW_UPLOAD_SECONDS", -1.0)
    monkeypatch.setattr("recipes.checkpoints.upload.RETRY_PAUSES_SECONDS", ())
    may_go = {machine.folder: threading.Semaphore(0) for machine in together}
    put_files = Store.put_files

    def slowly(self: Store, folder: Path, uri: str, manifest: Manifest) -> None:
        assert may_go[folder.parent].acquire(timeout=10)
        put_files(self, folder, uri, manifest)

    monkeypatch.setattr(Store, "put_files", slowly)

    def save_on_all(step: int) -> None:
        waits = any(machine.has_pending_uploads() for machine in together)
        for number, machine in enumerate(together, 1):
            write(machine, step, CheckpointPart(number=number, of=2, save=f"save-{step}"), defer_upload=waits)
            machine.wait_for_commit()

    def let_go(machine: CheckpointManager) -> None:
        may_go[machine.folder].release()
        machine.stored.drain_uploads()

    first, second = together
    save_on_all(2)
    save_on_all(4)
    let_go(first)
    save_on_all(6)
    let_go(second)
    save_on_all(8)
    let_go(first)
    save_on_all(10)
    let_go(second)
    assert first.stored_steps() == [8, 2]
    for machine in together:
        may_go[machine.folder].release(2)
        machine.wait()
    assert first.stored_steps() == [10, 8, 2]


def test_deferred_parts_are_uploaded_at_the_end(store: Store, tmp_path: Path) -> None:
    together = machines(store, tmp_path)
    for step, loss in ((4, 1.0), (6, 3.0), (8, 2.0)):
        for number, machine in enumerate(together, 1):
            write(machine, step, CheckpointPart(number=number, of=2, save=f"save-{step}"), loss, defer_upload=True)
    assert together[0].stored_steps() == []
    for machine in together:
        machine.wait()
    assert together[0].stored_steps() == [8, 4], "the newest and the best"
    together[0].require_complete_parts()


def test_checkpoint_common_to_all_machines_is_kept_until_next_is_complete(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were killed during an outage, when one machine had its newest part."""
    first, second = (CheckpointManager(tmp_path / name, store, URI, 1) for name in ("first", "second"))
    with monkeypatch.context() as away:
        away.setattr("recipes.checkpoints.upload.RETRY_PAUSES_SECONDS", ())
        away.setattr(Store, "put_files", lambda *given: (_ for _ in ()).throw(OSError("away")))
        for step in (4, 6):
            for number, machine in enumerate((first, second), 1):
                write(machine, step, CheckpointPart(number=number, of=2, save=f"save-{step}"))
                machine.wait_for_commit()
                machine.stored.drain_uploads()
        write(first, 8, CheckpointPart(number=1, of=2, save="save-8"))
        first.wait_for_commit()
        first.stored.drain_uploads()
    assert set(first.local_steps()) & set(second.local_steps()) == {6}
