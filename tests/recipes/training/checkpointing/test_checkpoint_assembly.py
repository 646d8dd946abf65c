"""Machines killed during part uploads resume from the newest checkpoint that can be assembled."""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest

from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import PARTS_FOLDER, CheckpointPart, NodeShard, assemble_if_complete
from recipes.checkpoints.remote import RemoteCheckpoints
from recipes.contracts.job import StoreAddress
from recipes.contracts.recipe import Recipe
from recipes.contracts.rewind import Rewind
from recipes.runner import Restart
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.buckets import StoreRefuses
from recipes.training.checkpointing.resume_point import agree_on_checkpoint
from recipes.training.data.sample_order import RunSamples, SampleOrder
from recipes.training.divergence import Divergence
from recipes.training.parallel.process_group import ProcessGroup
from recipes.training.recovery import discard_local_checkpoints, roll_back
from tests.support.recipes.checkpoint_parts import URI, of, rows_in, save, write
from tests.support.recipes.interrupted_checkpoint import forget, found, save_without_saying_so, wanted
from tests.support.recipes.threaded_node import Node
from tests.support.s3_server import VARIABLES, S3Server


@pytest.fixture
def machines(tmp_path: Path) -> list[CheckpointManager]:
    store = Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets={"checkpoints": "c"}))
    return [CheckpointManager(tmp_path / name, store, URI, 3) for name in ("first", "second")]


def resume(machines: Sequence[CheckpointManager], *sent_back: int) -> list[dict[str, str] | None]:
    """Resume both machines; return the checkpoint rows that each machine loads."""
    gathered, barrier = [None, None], Barrier(2)

    def one(rank: int) -> dict[str, str] | None:
        try:
            back = [Rewind(step=step) for step in sent_back]
            _, found = agree_on_checkpoint(machines[rank], "latest", back, Node(rank, gathered, barrier))
        except BaseException:
            barrier.abort()
            raise
        return rows_in(found[1]) if found else None

    with ThreadPoolExecutor(2) as nodes:
        ended = [nodes.submit(one, rank) for rank in range(2)]
    for node in ended:  # the other node only sees a broken barrier
        if isinstance(error := node.exception(), Restart):
            raise error
    return [node.result() for node in ended]


def test_resume_uploads_both_parts_when_none_had_arrived(machines: list[CheckpointManager]) -> None:
    save(machines, 4)
    save(machines, 6)
    forget(machines[0].store, f"{URI}/6")
    assert resume(machines) == [of(6)] * 2
    assert machines[0].stored_steps() == [6, 4]


def test_resume_uses_uploaded_part_of_a_lost_machine(machines: list[CheckpointManager]) -> None:
    save(machines, 4)
    write(machines[1], 6, CheckpointPart(number=2, of=2, save="save-6"))
    machines[1].wait()
    shutil.rmtree(machines[1].folder)
    write(machines[0], 6, CheckpointPart(number=1, of=2, save="save-6"))
    machines[0].wait()
    forget(machines[0].store, f"{URI}/6/{MANIFEST_FILE}", f"{URI}/6/rows-1", f"{URI}/6/schedule")
    put_record_back(machines[0].store)
    assert resume(machines) == [of(6)] * 2


def put_record_back(store: Store) -> None:
    """Restore the record of the second part, as it was before assembly."""
    second = CheckpointManager(Path(store.local_path(URI) or "").parent / "scratch", store, URI, 3)
    write(second, 6, CheckpointPart(number=2, of=2, save="save-6"))
    second.wait()


def test_resume_completes_a_checkpoint_whose_parts_all_arrived(machines: list[CheckpointManager]) -> None:
    save_without_saying_so(machines, 6)
    assert resume(machines) == [of(6)] * 2
    assert not any(f"/{PARTS_FOLDER}/" in uri for uri in machines[0].store.list(URI))


@pytest.mark.parametrize("removed", range(6))
def test_partially_deleted_checkpoint_is_not_reassembled(
    machines: list[CheckpointManager], monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    """Interrupt the deletion of a checkpoint after `removed` objects.

    A kill used to leave the part records behind, from which the manifest of a diverged checkpoint was assembled
    again.
    """
    save_without_saying_so(machines, 6)
    store = machines[0].store
    with monkeypatch.context() as killed:
        killed.setattr(Store, "delete", lambda *given: None)
        assemble_if_complete(store, f"{URI}/6", CheckpointPart(number=1, of=2, save="save-6"))
    remove, left = Store.remove, iter(range(removed))

    def until_it_is_killed(self: Store, uri: str) -> None:
        if next(left, None) is None:
            raise InterruptedError
        remove(self, uri)

    with monkeypatch.context() as killed, suppress(InterruptedError):
        killed.setattr(Store, "remove", until_it_is_killed)
        machines[0].stored.delete(6)
    is_there = machines[0].stored_steps() == [6]
    assert resume(machines) == ([of(6)] * 2 if is_there else [None, None])


def test_machines_fetch_only_after_assembly_is_complete(
    machines: list[CheckpointManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetching earlier also fetched the previous checkpoint, which takes minutes for a large model."""
    save(machines, 4)
    save_without_saying_so(machines, 6)
    looked = Event()
    asked: list[int] = []
    fetch = RemoteCheckpoints.fetch

    def fetched(self: RemoteCheckpoints, step: int, share: NodeShard | None) -> bool:
        asked.append(step)
        looked.set()
        return fetch(self, step, share)

    def slowly(*given: Any) -> None:
        looked.wait(0.5)
        assemble_if_complete(*given)

    monkeypatch.setattr(RemoteCheckpoints, "fetch", fetched)
    monkeypatch.setattr("recipes.training.checkpointing.checkpoint_assembly.assemble_if_complete", slowly)
    assert resume(machines) == [of(6)] * 2
    assert asked == [6, 6]


def test_resume_falls_back_when_one_part_was_not_finished(machines: list[CheckpointManager]) -> None:
    save(machines, 4)
    write(machines[0], 6, CheckpointPart(number=1, of=2, save="save-6"))
    machines[0].wait()
    assert resume(machines) == [of(4)] * 2
    assert machines[0].local_steps() == [4]


def test_orphaned_newer_parts_are_discarded_on_resume(machines: list[CheckpointManager]) -> None:
    """Their weights were lost, and they would count against `keep_last` in place of newer checkpoints."""
    save(machines, 4)
    for step in (10, 12, 14):
        write(machines[1], step, CheckpointPart(number=2, of=2, save="lost"))
    machines[1].wait()
    assert resume(machines) == [of(4)] * 2
    assert machines[1].local_steps() == [4]
    for step in (6, 8, 10):
        save(machines, step, "again")
    assert machines[0].stored_steps()[:3] == [10, 8, 6]
    assert resume(machines) == [of(10, save="again")] * 2


def test_orphaned_parts_are_discarded_when_run_starts_from_the_beginning(machines: list[CheckpointManager]) -> None:
    for step in (10, 12, 14):
        write(machines[1], step, CheckpointPart(number=2, of=2, save="lost"))
    machines[1].wait()
    assert resume(machines) == [None, None]
    assert machines[1].local_steps() == []


def test_resume_survives_swapped_node_ranks(machines: list[CheckpointManager]) -> None:
    save(machines, 6)
    forget(machines[0].store, f"{URI}/6")
    assert resume(machines[::-1]) == [of(6)] * 2


def test_corrupt_local_part_falls_back_to_previous_checkpoint(
    machines: list[CheckpointManager], capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither part was in the store."""
    save(machines, 4)
    save(machines, 6)
    forget(machines[0].store, f"{URI}/4", f"{URI}/6")
    (machines[1].folder / "6" / "rows-2").write_text("spoiled")
    assert resume(machines) == [of(4)] * 2
    assert "checkpoint 6 rows-2 has 7 bytes" in capsys.readouterr().out


def test_checkpoint_corrupt_in_the_store_is_uploaded_again(machines: list[CheckpointManager]) -> None:
    """Both machines have their parts, but used to fall back to the previous checkpoint.

    One machine deletes the corrupt upload; the other may notice the deletion.
    """
    save(machines, 4)
    save(machines, 6)
    machines[0].store.put_bytes(f"{URI}/6/rows-2", b"spoiled")
    with pytest.raises(Restart, match=r"uploaded checkpoint 6 is broken .*: its parts may be whole"):
        resume(machines)
    assert resume(machines) == [of(6)] * 2


def test_corrupt_upload_with_lost_part_falls_back_to_previous_checkpoint(machines: list[CheckpointManager]) -> None:
    save(machines, 4)
    save(machines, 6)
    machines[0].store.put_bytes(f"{URI}/6/rows-2", b"spoiled")
    shutil.rmtree(machines[1].folder)
    with suppress(Restart):  # if the machine that lost its part notices first, both fall back immediately
        resume(machines)
    assert resume(machines) == [of(4)] * 2


def test_best_and_newest_checkpoint_are_uploaded_on_resume(machines: list[CheckpointManager]) -> None:
    save(machines, 4, loss=1.0)
    save(machines, 6, loss=2.0)
    save(machines, 8, loss=3.0)
    forget(machines[0].store, f"{URI}/4", f"{URI}/6", f"{URI}/8")
    assert resume(machines) == [of(8)] * 2
    assert machines[0].stored_steps() == [8, 4]
    best = machines[0].best()
    assert best and rows_in(best[1]) == of(4)


def test_parts_of_a_branch_are_assembled(machines: list[CheckpointManager]) -> None:
    save(machines, 4)
    ways = [checkpoints.branch("from-4", 4) for checkpoints in machines]
    save(ways, 6, "second way")
    forget(machines[0].store, f"{URI}/from-4")
    assert resume(machines, 4) == [of(6, save="second way")] * 2
    assert machines[0].stored_steps() == [4] and ways[0].stored_steps() == [6]


def test_one_machine_resumes_from_the_parts_of_two(machines: list[CheckpointManager], tmp_path: Path) -> None:
    save(machines, 6)
    _, found = agree_on_checkpoint(machines[0], "latest", (), ProcessGroup())
    assert found and rows_in(found[1]) == of(6)


def test_requested_step_is_uploaded_and_resumed_from(machines: list[CheckpointManager]) -> None:
    """Both machines have the checkpoint; its upload was skipped because uploads were slow."""
    for step in (4, 6, 8):
        save(machines, step)
    forget(machines[0].store, f"{URI}/6")
    assert resume(machines, 6) == [of(6)] * 2


def test_incomplete_checkpoint_is_not_selected_as_best(machines: list[CheckpointManager]) -> None:
    """The other part was on a machine replaced before its upload; the run never ended."""
    save(machines, 4, loss=1.0)
    save(machines, 6, loss=2.0)
    forget(machines[0].store, f"{URI}/4")
    shutil.rmtree(machines[1].folder)
    assert resume(machines) == [of(6)] * 2
    save(machines, 8, loss=3.0)
    machines[0].require_complete_parts()
    best = machines[0].best()
    assert best and best[0] == 6


def test_new_machine_does_not_wait_for_its_own_local_best(machines: list[CheckpointManager]) -> None:
    """A replaced machine used to restart endlessly at the end of the run.

    The other machine has a better checkpoint, so the upload of this one was skipped.
    """
    save(machines, 4, loss=1.0)
    save(machines, 6, loss=4.0)
    shutil.rmtree(machines[0].folder)
    assert resume(machines) == [of(6)] * 2
    for number, machine in enumerate(machines, 1):
        write(machine, 8, CheckpointPart(number=number, of=2, save="save-8"), loss=2.0, defer_upload=True)
        write(machine, 10, CheckpointPart(number=number, of=2, save="save-10"), loss=3.0)
        machine.wait()
    assert machines[0].stored_steps() == [10, 6, 4]
    machines[0].require_complete_parts()
    best = machines[0].best()
    assert best and rows_in(best[1]) == of(4)


def test_local_best_of_a_new_machine_is_not_uploaded_when_store_has_a_better_one(machines: list[CheckpointManager]) -> None:
    """A part of a large model takes minutes to upload."""
    save(machines, 4, loss=1.0)
    save(machines, 6, loss=4.0)
    shutil.rmtree(machines[0].folder)
    assert resume(machines) == [of(6)] * 2
    save(machines, 8, loss=2.0)
    save(machines, 10, loss=3.0)
    forget(machines[0].store, f"{URI}/8")
    assert resume(machines) == [of(10)] * 2
    machines[0].upload_missing()
    machines[0].wait()
    assert machines[0].local_steps() == [10, 8, 6] and not machines[0].store.list(f"{URI}/8")


def test_best_checkpoint_before_the_rewind_step_is_uploaded(machines: list[CheckpointManager]) -> None:
    """A better checkpoint follows the rewind step, and uploads were slow.

    The best one before it was therefore in no store, and another one was published.
    """
    save(machines, 4, loss=1.0)
    save(machines, 6, loss=2.0)
    save(machines, 8, loss=0.5)
    forget(machines[0].store, f"{URI}/4")
    assert resume(machines, 6) == [of(6)] * 2
    best = machines[0].branch("from-6", 6).best()
    assert best and rows_in(best[1]) == of(4)


def test_diverged_run_rolls_back_to_parts_not_yet_uploaded(machines: list[CheckpointManager]) -> None:
    """Uploads were slow and skipped checkpoint 6.

    Without its parts, two machines rolled back further than a single one.
    """
    save(machines, 4)
    save(machines, 6)
    forget(machines[0].store, f"{URI}/6")
    save(machines, 8)
    recipe = Recipe.named("smollm2-135m-full")
    samples = RunSamples(SampleOrder(100, 0), 4, 20)
    heal = partial(roll_back, machines[0].store, URI, recipe, machines[0], samples, Divergence(8, 8, "bad"), ())
    with pytest.raises(Restart, match="parts of checkpoint 6"):
        heal()
    assert resume(machines) == [of(6)] * 2
    assert heal() == (6, machines[0].folder / "6")


def test_rollback_survives_swapped_node_ranks(machines: list[CheckpointManager]) -> None:
    """The second node fetched a checkpoint that turned out corrupt, and is first afterwards."""
    for step in (4, 6, 8):
        save(machines, step)
    for machine in machines:
        shutil.rmtree(machine.folder)
    assert resume(machines) == [of(8)] * 2
    diverged, samples = Divergence(8, 10, "bad"), RunSamples(SampleOrder(100, 0), 4, 20)
    discard_local_checkpoints(machines[1], diverged, ())
    good = roll_back(machines[0].store, URI, Recipe.named("smollm2-135m-full"), machines[0], samples, diverged, ())
    assert good and good[0] == 6
    assert resume(machines[::-1]) == [of(6)] * 2


def test_uploaded_parts_of_lost_checkpoints_are_deleted_in_all_branches(
    machines: list[CheckpointManager], capsys: pytest.CaptureFixture[str]
) -> None:
    """Only those of the newest branch were deleted; the others stayed in the store forever."""
    store = machines[0].store
    save(machines, 4)
    save(machines, 6)
    store.delete(f"{URI}/6/{MANIFEST_FILE}")
    store.put_bytes(f"{URI}/6/{PARTS_FOLDER}/1-of-2.json", (machines[0].folder / "6" / MANIFEST_FILE).read_bytes())
    store.put_bytes(f"{URI}/8/rows-1", b"cut off before it was said that it had arrived")
    shutil.rmtree(machines[1].folder)
    store.put_bytes(f"{URI}/4/of-an-objective/1/file", b"of a checkpoint that is whole")
    assert resume(machines, 4) == [of(4)] * 2
    assert {uri.removeprefix(f"{URI}/").split("/")[0] for uri in store.list(URI)} == {"4"}
    assert f"{URI}/4/of-an-objective/1/file" in store.list(URI)
    output = capsys.readouterr().out
    assert "checkpoint 6 was deleted from the store" in output and "checkpoint 8 was deleted from the store" in output


def test_failed_deletion_of_lost_parts_does_not_end_the_run(
    machines: list[CheckpointManager], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(machines, 4)
    for step in (6, 8):
        machines[0].store.put_bytes(f"{URI}/{step}/rows-1", b"cut off")

    def refused(store: Store, uri: str) -> None:
        raise PermissionError(f"no right to delete {uri}")

    monkeypatch.setattr(Store, "delete", refused)
    assert resume(machines) == [of(4)] * 2
    output = capsys.readouterr().out
    assert all(f"checkpoint {step} lost its other parts, but was not deleted: PermissionError" in output for step in (6, 8))


def test_partial_upload_of_a_locally_complete_checkpoint_is_kept(machines: list[CheckpointManager]) -> None:
    """The upload continues, and objects already in the store are not sent again."""
    store, (first, _) = machines[0].store, machines
    for step in (4, 6):
        with first.save(step) as folder:
            (folder / "rows-1").write_text(f"alone {step}")
    first.wait()
    store.delete(f"{URI}/4/{MANIFEST_FILE}")
    assert resume(machines) == [{"rows-1": "alone 6"}] * 2
    assert f"{URI}/4/rows-1" in store.list(URI)


def test_newest_complete_save_is_wanted() -> None:
    six, eight = [found(6, 1, "a"), found(6, 2, "a")], [found(8, 1, "b"), found(8, 2, "b")]
    assert wanted([*six, *eight]) == {"b"}
    assert wanted([*six, eight[0]]) == {"a"}
    assert wanted([*six, eight[0]], {6: None}) == set(), "it is there"
    assert wanted(six, {8: None}) == set(), "a newer one is there"
    assert wanted([*six, found(8, 1, "b"), found(8, 2, "c")]) == {"a"}, "of two times"
    assert wanted([found(6, 1, "a", 3), found(6, 2, "a", 3)]) == set()
    assert wanted([*six, found(4, 1, "w", way="from-2"), found(4, 2, "w", way="from-2")]) == {"a", "w"}
    best = [found(2, 1, "best", loss=1.0), found(2, 2, "best", loss=1.0)]
    assert wanted([*best, *six]) == {"a", "best"}
    assert wanted([*best, *six], {4: 2.0, 8: None}) == {"best"}
    assert wanted([*best, *six], {4: 0.5, 8: None}) == set(), "a better one is there"
    assert wanted([*six, *eight], asked={6}) == {"a", "b"}
    assert wanted([*six, *eight], {6: None}, {6}) == {"b"}
    assert wanted([*best, *six], {8: 0.5}, {6}) == {"best", "a"}
    assert wanted([*best, *six], {4: 0.5, 8: None}, {6}) == {"a"}, "a better one is there"
    assert wanted([]) == wanted([], {6: None}) == set()


@pytest.fixture
def on_s3(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CheckpointManager]:
    monkeypatch.setattr("recipes.checkpoints.upload.RETRY_PAUSES_SECONDS", (0.0, 0.0))
    return [CheckpointManager(tmp_path / name, Store(s3.address, VARIABLES), URI, 3) for name in ("first", "second")]


def test_part_upload_is_retried_after_one_refusal(on_s3: list[CheckpointManager], s3: S3Server) -> None:
    """Retries are the same as for background uploads.

    Without them one refusal ended this start, and with it the start of every other machine.
    """
    save(on_s3, 6)
    forget(on_s3[0].store, f"{URI}/6")
    s3.refusing = 1
    assert resume(on_s3) == [of(6)] * 2
    assert s3.refusing == 0


def test_manifest_upload_is_retried_after_one_refusal(on_s3: list[CheckpointManager], s3: S3Server) -> None:
    save_without_saying_so(on_s3, 6)
    s3.refusing = 1
    assert resume(on_s3) == [of(6)] * 2
    assert s3.refusing == 0


def test_persistent_store_refusal_ends_the_start_with_advice(
    on_s3: list[CheckpointManager], s3: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is kept on this machine."""
    alone = on_s3[:1]
    save(alone, 6)
    forget(alone[0].store, f"{URI}/6")
    s3.refusing = 1_000
    with pytest.raises(StoreRefuses, match=r"403 Forbidden: AccessDenied.*storage\.access_key"):
        agree_on_checkpoint(alone[0], "latest", (), ProcessGroup())
    said = [line.partition(" ")[2].partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said[-3:] == [f"upload of checkpoint 6 failed, {then}" for then in ("again in 0 s", "again in 0 s", "given up")]
    s3.refusing = 0
    _, found = agree_on_checkpoint(alone[0], "latest", (), ProcessGroup())
    assert found and rows_in(found[1]) == of(6, 1)


def test_only_one_of_two_saves_of_a_step_is_wanted() -> None:
    assert len(wanted([found(6, 1, "a"), found(6, 2, "a"), found(6, 2, "b"), found(6, 1, "b")])) == 1
