"""Replay of a recovered run: same samples, losses and weights, bit for bit."""

from pathlib import Path

import pytest

from recipes import train as program
from recipes.contracts.job import OUT_OF_MEMORY_FILE
from recipes.contracts.recovery_log import OutOfMemory
from recipes.runner import Preempted, Restart
from tests.recipes.training.training_workspace import Place, facts, stop_after, weights


@pytest.mark.slow
def test_replay_repeats_smaller_micro_batches_from_their_step_on(place: Place, tmp_path: Path) -> None:
    """Micro-batches define the order of sums: only equal ones give bit-identical results.

    No checkpoint is due at that step.
    """
    work = tmp_path / "first"
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Preempted):
        patched.setattr(program.StopOnSignal, "on_step_end", stop_after(3))
        place.train(work)
    (work / OUT_OF_MEMORY_FILE).touch()
    first = place.train(work)
    (incident,) = facts(first).incidents
    assert incident == OutOfMemory(step=None, batch_size=2, gradient_accumulation=2, after=3)

    again = tmp_path / "again"
    with pytest.raises(Restart, match="after step 3 the replayed run used smaller micro-batches"):
        place.train(again, repeats=[incident])
    assert place.checkpoints(again).local_steps() == [3, 2]
    repeated = place.train(again, repeats=[incident])
    assert facts(repeated).incidents == (incident,) and facts(repeated).resumed_from == 3
    assert facts(repeated).losses == facts(first).losses
    assert weights(place, repeated) == weights(place, first)
    assert weights(place, place.train(tmp_path / "otherwise")) != weights(place, first)
    # from the beginning: no step uses the micro-batch that did not fit
    early = incident.model_copy(update={"after": 0})
    assert facts(place.train(tmp_path / "early", repeats=[early])).incidents == (early,)


@pytest.mark.requirement("Y11")
@pytest.mark.slow
@pytest.mark.parametrize("first", ["diverged", "out_of_memory"])
def test_replay_of_rollback_and_smaller_micro_batches_is_bit_identical(
    place: Place, tmp_path: Path, poisoned: list[int], consumed: list[list[int]], first: str
) -> None:
    """Covers both orders of the two recoveries.

    After a rollback, smaller micro-batches start later than the discarded steps of the same numbers. Before a
    rollback, they start at the step that it leads to.
    """
    work, changed = tmp_path / f"{first}-healed", {"divergence": {"action": "skip"}, "lora_dropout": 0.1}
    if first == "diverged":
        with pytest.raises(Restart, match="continuing from checkpoint 2 without samples 12 to 19"):
            place.train(work, **changed)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Preempted):
        patched.setattr(program.StopOnSignal, "on_step_end", stop_after(4))
        place.train(work, **changed)
    (work / OUT_OF_MEMORY_FILE).touch()
    if first == "out_of_memory":
        with pytest.raises(Restart, match="continuing from checkpoint 2 without samples 12 to 19"):
            place.train(work, **changed)
    healed = place.train(work, **changed)
    incidents = facts(healed).incidents
    memory = OutOfMemory(step=None, batch_size=2, gradient_accumulation=2, after=4 if first == "diverged" else 2)
    assert incidents[0].kind == first and memory in incidents and len(incidents) == 2

    consumed.clear()
    again = tmp_path / f"{first}-again"
    with pytest.raises(Restart, match=f"after step {memory.after} the replayed run used smaller micro-batches"):
        place.train(again, repeats=incidents, **changed)
    repeated = place.train(again, repeats=incidents, **changed)
    assert facts(repeated).losses == facts(healed).losses and len(facts(healed).losses) == 8
    assert weights(place, repeated) == weights(place, healed)
    assert set(facts(repeated).incidents) == set(incidents)
    asked = [[row for row in call if row != poisoned[17]] for call in consumed]
    seen = 4 * (memory.after or 0)
    assert asked[0][:seen] + asked[1] == poisoned[:12] + poisoned[20:40]


@pytest.mark.slow
@pytest.mark.parametrize(("stopped", "interval_steps"), [(3, 2), (None, 1)], ids=["saved-by-the-way", "not-saved-then"])
def test_replay_of_a_diverged_run_ends_with_its_rolled_back_weights(
    place: Place, tmp_path: Path, poisoned: list[int], stopped: int | None, interval_steps: int
) -> None:
    """When a checkpoint is saved also depends on the clock and on signals."""
    work = tmp_path / f"ended-{stopped}"
    if stopped:
        with pytest.MonkeyPatch.context() as patched, pytest.raises(Preempted):
            patched.setattr(program.StopOnSignal, "on_step_end", stop_after(stopped))
            place.train(work)
    ended = place.train(work)
    policy = {"interval": "1h", "interval_steps": interval_steps, "keep_last": 3}
    repeated = place.train(tmp_path / f"ended-{stopped}-again", facts(ended).incidents, checkpoint=policy)
    assert facts(repeated).published_step == facts(ended).published_step == (stopped or 2)
    assert weights(place, repeated) == weights(place, ended)
    assert facts(repeated).incidents == facts(ended).incidents
    assert place.checkpoints(tmp_path / f"ended-{stopped}-again").local_steps()[0] == (stopped or 2)
