"""Staged copies of checkpoint state: a snapshot of its step, in one reused allocation."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.training.checkpointing.staging import Staging


def kept(states: list[Any]) -> Callable[[Any], None]:
    return states.append


def test_staged_state_is_a_snapshot_while_training_continues() -> None:
    weight = torch.arange(6.0).view(2, 3).t()
    state = {"state": {0: {"step": torch.tensor(7.0), "exp_avg": weight}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    staging, may_write, found = Staging(), threading.Event(), []

    def write(copy: Any) -> None:
        assert may_write.wait(60)
        found.append(copy)

    staging.stage(state, write)
    begun = staging.begin()
    weight.zero_()
    assert not found and not begun.done()
    may_write.set()
    staging.settle()
    [copy] = found
    assert copy["param_groups"] == [{"lr": 0.5, "params": [0]}] and copy["state"][0]["step"] == 7
    assert copy["state"][0]["exp_avg"].equal(torch.arange(6.0).view(2, 3).t())
    assert copy["state"][0]["exp_avg"].stride() == weight.stride(), "an optimizer may read them in the order of its weights"


def test_staging_reuses_the_memory_of_the_previous_checkpoint() -> None:
    weights, moments, found = {"a": torch.ones(3), "b": torch.ones(2, 2)}, {"a": torch.zeros(3)}, []
    staging = Staging()
    for step in range(1, 4):
        weights["a"].fill_(step)
        staging.settle()
        staging.stage(weights, kept(found))
        staging.stage(moments, kept(found))
        staging.begin()
    staging.settle()
    assert [copy["a"].tolist() for copy in found] == [[3, 3, 3], [0, 0, 0]] * 3, "the last are where all of them were"
    assert len({copy["a"].data_ptr() for copy in found}) == 2
    found.clear()
    weights["a"] = torch.ones(5)
    staging.stage(weights, kept(found))
    staging.begin()
    staging.settle()
    assert found[0]["a"].tolist() == [1] * 5


def test_staged_copy_preserves_shared_memory() -> None:
    """Safetensors detects tied weights by their shared memory, and writes them once."""
    embedding, found = torch.ones(4, 2), []
    staging = Staging()
    staging.stage({"embed": embedding, "head": embedding.view(4, 2), "first": embedding[:2]}, kept(found))
    staging.begin()
    staging.settle()
    assert found[0]["embed"].data_ptr() == found[0]["head"].data_ptr() != embedding.data_ptr()
    assert found[0]["first"].shape == (2, 2)


@pytest.mark.parametrize(("processes", "free", "at_once"), [(1, 24, False), (1, 23, True), (2, 47, True), (2, 48, False)])
def test_staging_writes_synchronously_without_memory_for_copies(processes: int, free: int, at_once: bool) -> None:
    """Each process needs 12 bytes. Earlier actions run before the write."""
    weight, order, may_write = torch.ones(3), [], threading.Event()

    def write(state: Any) -> None:
        assert state["weight"] is weight or may_write.wait(60)
        order.append("itself" if state["weight"] is weight else "copy")

    staging = Staging(processes, free=lambda: free)
    staging.add_action(lambda: order.append("before"))
    staging.stage({"weight": weight}, write)
    assert order == []
    assert staging.begin().done() == at_once
    may_write.set()
    staging.settle()
    assert order == ["before", "itself" if at_once else "copy"]


def test_staging_is_synchronous_when_any_process_lacks_memory() -> None:
    """A failed write is raised immediately: the other processes would wait for hours."""
    calls, written = [], []

    def in_any(lacks_room: bool) -> bool:
        calls.append(lacks_room)
        return len(calls) == 2

    staging = Staging(free=lambda: 1000, any_process=in_any)
    for _ in range(2):
        staging.settle()
        staging.stage(torch.ones(3), kept(written))
        begun = staging.begin()
    assert begun.done() and len(written) == 2 and calls == [False, False]
    short = Staging(free=lambda: 0)
    short.stage(torch.ones(3), lambda state: state.missing)
    with pytest.raises(AttributeError, match="missing"):
        short.begin()
    short.raise_if_failed()


def test_free_memory_is_checked_for_each_checkpoint() -> None:
    free, waited = iter([0, 1000]), []
    staging = Staging(free=lambda: next(free), any_process=lambda lacks_room: waited.append(lacks_room) or lacks_room)
    for _ in range(2):
        staging.settle()
        staging.stage(torch.ones(3), lambda _: None)
        staging.begin()
    assert waited == [True, False]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("pinned")]
)
def test_staging_writes_synchronously_after_an_allocation_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The error used to count as out of memory of a training step.

    The run was restarted with a smaller micro-batch.
    """

    def refuse(*given: Any, **named: Any) -> None:
        raise error

    weight, found = torch.ones(3), []
    staging = Staging(free=lambda: 1000)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", refuse)
        staging.stage(weight, kept(found))
        staging.begin()
    assert found[0] is weight
    staging.stage(weight, kept(found))
    staging.begin()
    staging.settle()
    assert found[1] is not weight and found[1].equal(weight)


def test_staging_keeps_allocated_memory_without_checking_again() -> None:
    """Also if memory sufficed for one state of a checkpoint and not for another."""
    free, found = iter([1000, 0, 0]), []
    staging = Staging(free=lambda: next(free))
    for _ in range(2):
        staging.settle()
        for name in ("weights", "moments"):
            staging.stage({name: torch.ones(100)}, lambda state: found.append([*state]))
        staging.begin()
    staging.settle()
    assert found == [["weights"], ["moments"]] * 2


def test_failed_background_write_is_raised_once(tmp_path: Path) -> None:
    staging = Staging()
    staging.add_action(lambda: (tmp_path / "missing" / "file").write_text(""))
    staging.add_action(lambda: (tmp_path / "file").write_text(""))
    begun = staging.begin()
    begun.exception()
    with pytest.raises(FileNotFoundError):
        staging.raise_if_failed()
    staging.raise_if_failed()
    staging.settle()
    assert not [*tmp_path.iterdir()], "what comes after it is not done"


def test_running_background_write_raises_nothing() -> None:
    staging, may_end = Staging(), threading.Event()
    staging.add_action(lambda: may_end.wait(60))
    staging.begin()
    staging.raise_if_failed()
    may_end.set()
    staging.close()


def test_state_staged_for_a_failed_checkpoint_is_discarded() -> None:
    staging, done = Staging(), []
    staging.stage(torch.ones(2), lambda _: done.append("first"))
    staging.settle()
    staging.stage(torch.ones(2), lambda _: done.append("second"))
    staging.begin()
    staging.settle()
    assert done == ["second"]


def test_closing_staging_releases_its_memory() -> None:
    asked, staging = [], Staging(free=lambda: asked.append(0) or 1000)
    staging.stage(torch.ones(2), lambda _: None)
    staging.begin()
    staging.close()
    staging.stage(torch.ones(2), lambda _: None)
    assert len(asked) == 2
