"""Each machine uploads its own parts once, and keeps parts that can still be completed."""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import PARTS_FOLDER
from recipes.checkpoints.remote import RemoteCheckpoints
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.training.checkpointing.checkpoint_assembly import assemble_checkpoints, find_complete_saves
from recipes.training.parallel.process_group import ProcessGroup
from tests.support.recipes.checkpoint_parts import URI, rows_in, save
from tests.support.recipes.interrupted_checkpoint import forget, found, save_without_saying_so, wanted
from tests.support.recipes.threaded_node import Node

LOST = "is a part, and others are lost"


@pytest.fixture
def machines(tmp_path: Path) -> list[CheckpointManager]:
    store = Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets={"checkpoints": "c"}))
    return [CheckpointManager(tmp_path / name, store, URI, 3) for name in ("first", "second")]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Machine and step of each upload."""
    uploads: list[str] = []
    send = RemoteCheckpoints.send

    def noted(self: RemoteCheckpoints, step: int) -> Any:
        uploads.append(f"{self.folder.name} {step}")
        return send(self, step)

    monkeypatch.setattr(RemoteCheckpoints, "send", noted)
    return uploads


def brought(machines: Sequence[CheckpointManager]) -> None:
    gathered, barrier = [None] * 2, Barrier(2)
    with ThreadPoolExecutor(2) as nodes:
        list(nodes.map(lambda rank: assemble_checkpoints(machines[rank], Node(rank, gathered, barrier)), range(2)))


def test_first_machine_completes_only_the_newest_and_best_checkpoint(machines: list[CheckpointManager]) -> None:
    """A third checkpoint has all its parts as well, but is neither newest nor best."""
    for step, loss in ((2, 1.0), (4, 2.0), (6, 3.0)):
        save_without_saying_so(machines, step, loss)
    assemble_checkpoints(machines[0], ProcessGroup())
    assert machines[0].stored_steps() == [6, 2]


def test_uploaded_part_is_not_sent_again(machines: list[CheckpointManager], sent: list[str]) -> None:
    save(machines, 6)
    record = (machines[1].folder / "6" / MANIFEST_FILE).read_bytes()
    forget(machines[0].store, f"{URI}/6/{MANIFEST_FILE}", f"{URI}/6/rows-1")
    machines[0].store.put_bytes(f"{URI}/6/{PARTS_FOLDER}/2-of-2.json", record)
    sent.clear()
    brought(machines)
    assert sent == ["first 6"] and machines[0].stored_steps() == [6]


def test_one_process_per_machine_uploads_and_one_of_all_lists_the_store(
    machines: list[CheckpointManager], sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Another(ProcessGroup):
        """The second process of its machine, which agrees with the first one."""

        def __init__(self) -> None:
            super().__init__()
            self.rank, self.local_rank, self.local_size = 1, 1, 2

        def broadcast(self, value: Any) -> Any:
            assert value == ([], {}, set()), "it has looked itself"
            return value

        def all_gather(self, value: Any) -> list[Any]:
            assert value in ([], False, None), "it has brought something"
            return [value]

    save(machines, 6)
    monkeypatch.setattr(Store, "list", lambda *given: pytest.fail("it has looked into the store"))
    sent.clear()
    assemble_checkpoints(machines[0], Another())
    assert sent == [] and rows_in(machines[0].folder / "6")


def test_local_part_of_a_complete_upload_is_kept(
    machines: list[CheckpointManager], capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise its machine would fetch it again. The other machine is new."""
    save(machines, 6)
    shutil.rmtree(machines[1].folder)
    brought(machines)
    assert machines[0].local_steps() == [6] and LOST not in capsys.readouterr().out


def test_local_parts_of_unneeded_complete_checkpoints_are_kept(
    machines: list[CheckpointManager], sent: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A newer checkpoint may turn out corrupt. The best one is in the store."""
    for step, loss in ((2, 1.0), (4, 2.0), (6, 3.0)):
        save(machines, step, loss=loss)
    forget(machines[0].store, f"{URI}/4", f"{URI}/6")
    sent.clear()
    brought(machines)
    assert sorted(sent) == ["first 6", "second 6"] and machines[0].stored_steps() == [6, 2]
    assert [machine.local_steps() for machine in machines] == [[6, 4, 2]] * 2
    assert LOST not in capsys.readouterr().out


def test_lost_parts_of_others_are_logged_and_discarded(
    machines: list[CheckpointManager], capsys: pytest.CaptureFixture[str]
) -> None:
    save(machines, 6)
    forget(machines[0].store, f"{URI}/6")
    shutil.rmtree(machines[1].folder)
    brought(machines)
    assert machines[0].local_steps() == [] and f"checkpoint 6 {LOST}" in capsys.readouterr().out


def test_validation_loss_in_the_store_takes_precedence_over_parts() -> None:
    """It was evaluated after one machine had lost its part."""
    both = [found(step, number, f"save-{step}", loss=loss) for step, loss in ((2, 0.5), (4, None)) for number in (1, 2)]
    assert wanted(both, {4: 0.1, 6: None}) == set()
    assert wanted(both, {4: None, 6: None}) == {"save-2"}


def test_choice_between_two_saves_is_independent_of_part_order() -> None:
    parts = [found(6, number, save) for save in "ba" for number in (1, 2)]
    assert find_complete_saves(parts) == find_complete_saves(parts[2:] + parts[:2])


@pytest.mark.parametrize("way", [".", "from-4"])
def test_unrenamed_complete_part_is_uploaded(machines: list[CheckpointManager], way: str) -> None:
    """The process was killed between writing the manifest and the rename.

    A manual copy is not taken for a checkpoint, neither locally nor in the store.
    """
    ways = machines if way == "." else [checkpoints.branch(way, 4) for checkpoints in machines]
    save(ways, 6)
    forget(machines[0].store, f"{ways[0].uri}/6")
    (ways[0].folder / "6").rename(ways[0].folder / ".6.tmp")
    shutil.copytree(ways[1].folder / "6", ways[1].folder / "by-hand")
    machines[0].store.put_bytes(f"{ways[0].uri}/by-hand/{MANIFEST_FILE}", b"{}")
    brought(machines)
    assert ways[0].stored_steps() == ways[0].local_steps() == [6]
