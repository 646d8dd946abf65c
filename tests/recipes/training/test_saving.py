"""When a checkpoint is due: by the clock or by steps, and at the end."""

from transformers import TrainerControl, TrainerState, TrainingArguments

from recipes.schema import CheckpointPolicy
from recipes.training.group import Group
from recipes.training.saving import CheckpointWhenDue

MINUTE = 60.0


def saved(seconds_of_step: float, steps: int, policy: CheckpointPolicy) -> list[int]:
    """The steps after which a run saves whose steps all take so long."""
    now = 1e6
    due = CheckpointWhenDue(policy, Group(), clock=lambda: now)
    found = []
    for step in range(1, steps + 1):
        now += seconds_of_step
        state = TrainerState(global_step=step, max_steps=steps)
        if due.on_step_end(TrainingArguments(use_cpu=True), state, TrainerControl()).should_save:
            found.append(step)
    return found


def test_time_comes_first_where_steps_are_slow() -> None:
    """Counted from the last checkpoint, whatever it was for: with steps of 25 minutes, an hour is over after three."""
    policy = CheckpointPolicy(interval="1h", interval_steps=1000)
    assert saved(25 * MINUTE, 8, policy) == [3, 6, 8]
    assert saved(20 * MINUTE, 6, policy) == [3, 6]
    assert saved(20 * MINUTE + 1, 6, CheckpointPolicy(interval="20m", interval_steps=1000)) == [1, 2, 3, 4, 5, 6]


def test_steps_come_first_where_they_are_fast() -> None:
    assert saved(1.0, 2500, CheckpointPolicy(interval="1h", interval_steps=1000)) == [1000, 2000, 2500]


def test_a_checkpoint_for_its_step_starts_the_clock_anew() -> None:
    assert saved(25 * MINUTE, 9, CheckpointPolicy(interval="1h", interval_steps=4)) == [3, 4, 7, 8, 9]
