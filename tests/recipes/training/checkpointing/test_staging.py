"""Copies of what a checkpoint is made of: those of their step, whatever training does meanwhile, and one memory for all."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.training.checkpointing.staging import Staging


def kept(states: list[Any]) -> Callable[[Any], None]:
    return states.append


def test_what_is_written_is_as_it_was_given_while_training_goes_on() -> None:
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


def test_the_copies_of_a_checkpoint_take_the_place_of_those_of_the_one_before() -> None:
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


def test_what_shares_memory_shares_it_in_the_copy() -> None:
    """The library writes a tied weight once: by that it tells one."""
    embedding, found = torch.ones(4, 2), []
    staging = Staging()
    staging.stage({"embed": embedding, "head": embedding.view(4, 2), "first": embedding[:2]}, kept(found))
    staging.begin()
    staging.settle()
    assert found[0]["embed"].data_ptr() == found[0]["head"].data_ptr() != embedding.data_ptr()
    assert found[0]["first"].shape == (2, 2)


@pytest.mark.parametrize(("processes", "free", "at_once"), [(1, 24, False), (1, 23, True), (2, 47, True), (2, 48, False)])
def test_where_memory_is_short_training_waits_for_it_to_be_written(processes: int, free: int, at_once: bool) -> None:
    """12 bytes in each process. What was given before is written before."""
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


def test_where_memory_is_short_in_another_process_training_waits_too() -> None:
    """And says at once what fails: the others wait for this one, and would for hours."""
    told, written = [], []

    def in_any(lacks_room: bool) -> bool:
        told.append(lacks_room)
        return len(told) == 2

    staging = Staging(free=lambda: 1000, any_process=in_any)
    for _ in range(2):
        staging.settle()
        staging.stage(torch.ones(3), kept(written))
        begun = staging.begin()
    assert begun.done() and len(written) == 2 and told == [False, False]
    short = Staging(free=lambda: 0)
    short.stage(torch.ones(3), lambda state: state.missing)
    with pytest.raises(AttributeError, match="missing"):
        short.begin()
    short.raise_if_failed()


def test_memory_is_asked_for_anew_with_each_checkpoint() -> None:
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
def test_where_memory_for_copies_is_refused_it_is_written_without(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """It was taken for a step that does not fit: the run was started again with a smaller micro-batch."""

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


def test_memory_that_was_taken_is_not_asked_for_again() -> None:
    """Also where one state of a checkpoint found room, and another did not."""
    free, found = iter([1000, 0, 0]), []
    staging = Staging(free=lambda: next(free))
    for _ in range(2):
        staging.settle()
        for name in ("weights", "moments"):
            staging.stage({name: torch.ones(100)}, lambda state: found.append([*state]))
        staging.begin()
    staging.settle()
    assert found == [["weights"], ["moments"]] * 2


def test_what_could_not_be_written_is_noticed_once_and_soon(tmp_path: Path) -> None:
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


def test_nothing_is_noticed_of_what_is_under_way() -> None:
    staging, may_end = Staging(), threading.Event()
    staging.add_action(lambda: may_end.wait(60))
    staging.begin()
    staging.raise_if_failed()
    may_end.set()
    staging.close()


def test_what_was_given_of_a_checkpoint_that_failed_is_not_written_with_the_next() -> None:
    staging, done = Staging(), []
    staging.stage(torch.ones(2), lambda _: done.append("first"))
    staging.settle()
    staging.stage(torch.ones(2), lambda _: done.append("second"))
    staging.begin()
    staging.settle()
    assert done == ["second"]


def test_what_follows_training_has_the_memory() -> None:
    asked, staging = [], Staging(free=lambda: asked.append(0) or 1000)
    staging.stage(torch.ones(2), lambda _: None)
    staging.begin()
    staging.close()
    staging.stage(torch.ones(2), lambda _: None)
    assert len(asked) == 2
