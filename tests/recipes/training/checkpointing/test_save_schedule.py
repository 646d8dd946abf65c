"""When a checkpoint is due: by time, by steps, at the end, when best."""

import math

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from recipes.contracts.job import CheckpointPolicy
from recipes.training.checkpointing.save_schedule import SaveBestCheckpoint, SaveOnSchedule
from recipes.training.metrics.validation_loss import EVAL_LOSS_KEY
from recipes.training.parallel.process_group import ProcessGroup

MINUTE = 60.0


def saved(seconds_of_step: float, steps: int, policy: CheckpointPolicy) -> list[int]:
    """Return the steps after which a run saves whose steps all take this long."""
    now = 1e6
    due = SaveOnSchedule(policy, ProcessGroup(), clock=lambda: now)
    found = []
    for step in range(1, steps + 1):
        now += seconds_of_step
        state = TrainerState(global_step=step, max_steps=steps)
        if due.on_step_end(TrainingArguments(use_cpu=True), state, TrainerControl()).should_save:
            found.append(step)
    return found


@pytest.mark.requirement("Z15")
def test_slow_steps_save_by_time_interval() -> None:
    """Time counts from the last checkpoint of any kind.

    With steps of 25 minutes, an hour has passed after three.
    """
    policy = CheckpointPolicy(interval="1h", interval_steps=1000)
    assert saved(25 * MINUTE, 8, policy) == [3, 6, 8]
    assert saved(20 * MINUTE, 6, policy) == [3, 6]
    assert saved(20 * MINUTE + 1, 6, CheckpointPolicy(interval="20m", interval_steps=1000)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.requirement("Z15")
def test_fast_steps_save_by_step_interval() -> None:
    assert saved(1.0, 2500, CheckpointPolicy(interval="1h", interval_steps=1000)) == [1000, 2000, 2500]


def test_checkpoint_by_step_interval_resets_the_time_interval() -> None:
    assert saved(25 * MINUTE, 9, CheckpointPolicy(interval="1h", interval_steps=4)) == [3, 4, 7, 8, 9]


@pytest.mark.requirement("I7")
@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([2.0, 1.5, 1.7, 1.4], [1, 2, 4]),
        ([1.0, 1.0, 2.0], [1]),  # of equal losses the first is the best
        ([math.nan, 2.0, math.nan, -math.inf, 1.0], [2, 5]),  # a non-finite loss is never the best
    ],
)
def test_every_new_best_step_is_saved(losses: list[float], best: list[int]) -> None:
    """Independent of the time interval, and in addition to scheduled saves."""
    saving, state = SaveBestCheckpoint(), TrainerState()
    found = []
    for step, loss in enumerate(losses, 1):
        state.global_step = step
        state.log_history += [{"step": step, "loss": 0.0}, {"step": step, EVAL_LOSS_KEY: loss}]
        if saving.on_evaluate(TrainingArguments(use_cpu=True), state, TrainerControl()).should_save:
            found.append(step)
    assert found == best
