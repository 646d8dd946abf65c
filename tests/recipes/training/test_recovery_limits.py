"""Recovery limits: at most three events of each kind, then the run ends."""

from pathlib import Path

import pytest

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recovery_log import Diverged, OutOfMemory, add_recovery_event, read_recovery_log
from recipes.contracts.rewind import Rewind
from recipes.runner import Restart
from recipes.training.checkpointing.resume_point import find_resume_checkpoint
from recipes.training.data.sample_order import RunSamples, SampleOrder
from recipes.training.divergence import Divergence
from recipes.training.recovery import restart_with_smaller_batch, roll_back
from tests.recipes.training.training_workspace import CHECKPOINTS, Place, saved

STEPS = 100


def test_a_micro_batch_is_halved_three_times_and_no_more(place: Place) -> None:
    uri = CHECKPOINTS.format("often-halved")
    recipe = place.recipe.changed({"batch_size": 16, "gradient_accumulation": 1})
    for step, batch in ((5, 8), (6, 4), (7, 2)):
        restart_with_smaller_batch(place.store, uri, read_recovery_log(place.store, uri).shrink_recipe(recipe), step)
        newest = read_recovery_log(place.store, uri).out_of_memory[-1]
        assert newest == OutOfMemory(step=step, batch_size=batch, gradient_accumulation=16 // batch)
    known = read_recovery_log(place.store, uri)
    with pytest.raises(BadConfiguration, match="with batch_size 2, after it was reduced 3 times: give a shorter"):
        restart_with_smaller_batch(place.store, uri, known.shrink_recipe(recipe), 8)
    assert read_recovery_log(place.store, uri) == known


def test_simultaneous_out_of_memory_of_all_processes_counts_once(place: Place) -> None:
    """The second process to report it used to exceed the limit.

    The run then ended with a configuration error.
    """
    uri = CHECKPOINTS.format("at-once")
    recipe = place.recipe.changed({"batch_size": 16, "gradient_accumulation": 1})
    for step in (5, 6, 7):
        fitted = read_recovery_log(place.store, uri).shrink_recipe(recipe)
        first, second = (restart_with_smaller_batch(place.store, uri, fitted, step) for _ in range(2))
        assert str(first) == str(second)
    assert [entry.batch_size for entry in read_recovery_log(place.store, uri).out_of_memory] == [8, 4, 2]


def test_samples_are_skipped_three_times_and_then_a_divergence_ends_the_run(place: Place, tmp_path: Path) -> None:
    uri = CHECKPOINTS.format("often-diverged")
    recipe = place.recipe.changed({"divergence": {"action": "skip"}})

    def diverge(step: int) -> None:
        known = read_recovery_log(place.store, uri)
        samples = RunSamples(SampleOrder(4 * STEPS, recipe.seed, known.skipped), recipe.samples_per_step, STEPS)
        found = Divergence(step, step, f"the loss of step {step} is nan")
        checkpoints = place.checkpoints(tmp_path / "often-diverged")
        assert roll_back(place.store, uri, recipe, checkpoints, samples, found, ()) is None

    for step in (10, 20, 30):
        with pytest.raises(Restart, match=f"the loss of step {step} is nan; continuing from the beginning without samples"):
            diverge(step)
    diverge(40)
    skipped = [entry.skipped for entry in read_recovery_log(place.store, uri).diverged]
    assert skipped == [(32, 40), (80, 88), (128, 136), None]


@pytest.mark.parametrize(
    ("action", "own", "diverged", "back_to"),
    [("stop", (), 6, 4), ("stop", (6,), 7, 4), ("skip", (6,), 7, 4), ("skip", (6, 8), 9, 6), ("skip", (), 5, None)],
)
def test_diverged_run_does_not_roll_back_past_its_rewind_step(
    place: Place, tmp_path: Path, action: str, own: tuple[int, ...], diverged: int, back_to: int | None
) -> None:
    """This used to fail for a run killed after its first checkpoint.

    It kept the diverged weights, or reported a start from the beginning but did not start there.

    A run whose rewind step has diverged already would only diverge again.
    """
    name = f"sent-{action}-{own}-{diverged}"
    uri, checkpoints = CHECKPOINTS.format(name), place.checkpoints(tmp_path / name)
    recipe = place.recipe.changed({"divergence": {"action": action}})
    saved(checkpoints, 2, 4, 6)
    way, _ = find_resume_checkpoint(checkpoints, "latest", [Rewind(step=4)] * 2)
    saved(way, *own)
    samples = RunSamples(SampleOrder(4 * STEPS, recipe.seed), recipe.samples_per_step, STEPS)
    found = Divergence(diverged, diverged, f"the loss of step {diverged} is nan")
    if action == "skip" and back_to:
        with pytest.raises(Restart, match=f"continuing from checkpoint {back_to} without samples"):
            roll_back(place.store, uri, recipe, way, samples, found, ())
    else:
        good = roll_back(place.store, uri, recipe, way, samples, found, ())
        assert good == ((back_to, checkpoints.folder / str(back_to)) if back_to else None)
    (incident,) = read_recovery_log(place.store, uri).diverged
    assert incident.way == "from-4/from-4"
    assert (incident.rolled_back_to, incident.skipped is not None) == (back_to, action == "skip" and back_to is not None)


def test_recovery_limits_are_counted_per_kind(place: Place) -> None:
    """Three divergences leave all three micro-batch reductions available."""
    uri = CHECKPOINTS.format("of-both-kinds")
    for step in (10, 20, 30):
        skipped = (4 * step, 4 * step + 8)
        add_recovery_event(
            place.store, uri, Diverged(step=step, noticed=step, reason="r", rolled_back_to=None, skipped=skipped)
        )
    restart_with_smaller_batch(place.store, uri, place.recipe, 31)
    assert len(read_recovery_log(place.store, uri).out_of_memory) == 1
