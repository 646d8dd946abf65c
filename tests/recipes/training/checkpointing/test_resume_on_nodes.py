"""Machines that share a store resume from the same checkpoint and branch.

Their local folders may differ.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Literal

import pytest

from recipes.checkpoints.manager import CheckpointManager
from recipes.contracts.job import BadConfiguration, StoreAddress
from recipes.contracts.rewind import Rewind
from recipes.storage.artifact_store import Store
from recipes.training.checkpointing.resume_point import agree_on_checkpoint
from tests.support.recipes.threaded_node import Node

URI = "s3://hanzo-ml/checkpoints/run-1"


@pytest.fixture
def machines(tmp_path: Path) -> list[CheckpointManager]:
    store = Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets={"checkpoints": "c"}))
    return [CheckpointManager(tmp_path / name, store, URI, 3) for name in ("first", "second")]


def save(checkpoints: CheckpointManager, *steps: int, **facts: float) -> None:
    for step in steps:
        with checkpoints.save(step, facts) as folder:
            (folder / "weights").write_text(f"{step} of {checkpoints.uri}")
    checkpoints.wait()


def together(
    machines: Sequence[CheckpointManager], resume_from: Literal["latest", "best"] | int = "latest", *sent_back: int
) -> list[tuple[str, str | None]]:
    """Return the branch URI of each machine and the weights that it resumes from."""
    gathered, barrier = [None, None], Barrier(2)

    def one(rank: int) -> tuple[str, str | None]:
        try:
            way, found = agree_on_checkpoint(
                machines[rank], resume_from, [Rewind(step=step) for step in sent_back], Node(rank, gathered, barrier)
            )
        except BaseException:
            barrier.abort()
            raise
        assert found is None or (found[1].name == str(found[0]) and found[1].is_relative_to(machines[rank].folder))
        return way.uri, (found[1] / "weights").read_text() if found else None

    with ThreadPoolExecutor(2) as nodes:
        return [node.result() for node in [nodes.submit(one, rank) for rank in range(2)]]


def test_run_without_checkpoint_starts_on_all_nodes(machines: list[CheckpointManager]) -> None:
    assert together(machines) == [(URI, None)] * 2


def test_new_node_resumes_from_the_newest_checkpoint(machines: list[CheckpointManager]) -> None:
    save(machines[0], 2, 4)
    assert together(machines) == [(URI, f"4 of {URI}")] * 2


def test_nodes_resume_from_the_newest_local_checkpoint_of_the_first_node(machines: list[CheckpointManager]) -> None:
    save(machines[0], 2, 4)
    machines[0].store.delete(f"{URI}/4")
    assert together(machines) == [(URI, f"4 of {URI}")] * 2


def test_newer_local_checkpoint_of_another_node_is_ignored(machines: list[CheckpointManager]) -> None:
    """The first node was replaced; the other one still has checkpoints that were discarded."""
    save(machines[1], 2, 4)
    machines[1].store.delete(f"{URI}/4")
    assert together(machines) == [(URI, f"2 of {URI}")] * 2
    assert machines[1].local_steps() == [2]


def test_best_checkpoint_is_that_of_the_first_node(machines: list[CheckpointManager]) -> None:
    save(machines[0], 2, validation_loss=1.0)
    save(machines[0], 4, validation_loss=2.0)
    machines[0].store.delete(f"{URI}/2")
    assert together(machines, "best") == [(f"{URI}/from-2", f"2 of {URI}")] * 2


def test_requested_step_is_uploaded_by_the_first_node(machines: list[CheckpointManager]) -> None:
    save(machines[0], 2, 4)
    machines[0].store.delete(f"{URI}/2")
    assert together(machines, 2) == [(f"{URI}/from-2", f"2 of {URI}")] * 2


def test_missing_requested_step_is_refused(machines: list[CheckpointManager]) -> None:
    save(machines[0], 2, 4)
    with pytest.raises(BadConfiguration, match="there is no valid checkpoint 3"):
        together(machines, 3)


def test_rewound_run_resumes_from_its_branch(machines: list[CheckpointManager]) -> None:
    save(machines[0], 2, 4, 6)
    assert together(machines, "latest", 4) == [(f"{URI}/from-4", f"4 of {URI}")] * 2
    way = machines[0].branch("from-4", 4)
    save(way, 5, 6)
    way.store.delete(f"{way.uri}/6")
    assert together(machines, "latest", 4) == [(way.uri, f"6 of {way.uri}")] * 2
    assert together(machines, "latest", 4, 5) == [(f"{way.uri}/from-5", f"5 of {way.uri}")] * 2
