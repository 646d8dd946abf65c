"""Decide when a checkpoint is saved: by time, steps, best loss, or at the end."""

import math
import time
from collections.abc import Callable

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes.checkpoints.manager import CheckpointManager
from recipes.contracts.job import CheckpointPolicy
from recipes.contracts.quantities import parse_duration
from recipes.training.checkpointing.staging import Staging
from recipes.training.metrics.validation_loss import EVAL_LOSS_KEY
from recipes.training.parallel.process_group import ProcessGroup


class SaveOnSchedule(TrainerCallback):  # type: ignore[misc]
    """Save after a time or a number of steps, and at the end of training."""

    def __init__(self, policy: CheckpointPolicy, group: ProcessGroup, clock: Callable[[], float] = time.monotonic) -> None:
        self.group = group
        self.interval = parse_duration(policy.interval)
        self.interval_steps = policy.interval_steps
        self.clock = clock
        self.saved_at = clock()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        late = self.group.broadcast(self.clock() - self.saved_at >= self.interval)  # the leader's clock decides for all
        if late or state.global_step % self.interval_steps == 0 or state.global_step >= state.max_steps:
            self.saved_at = self.clock()
            control.should_save = True
        return control


class SaveBestCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Save every checkpoint whose validation loss is the run's lowest so far."""

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        losses = validation_losses(state)
        newest = losses.pop(state.global_step, math.nan)
        if newest < min(losses.values(), default=math.inf):  # never of NaN
            control.should_save = True
        return control


class RaiseWriteErrors(TrainerCallback):  # type: ignore[misc]
    """End the run at the next step if writing or completing a checkpoint failed."""

    def __init__(self, staging: Staging, checkpoints: CheckpointManager) -> None:
        self.staging = staging
        self.checkpoints = checkpoints

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.staging.raise_if_failed()
        self.checkpoints.raise_if_failed()


def validation_losses(state: TrainerState) -> dict[int, float]:
    """Return finite validation losses by step."""
    found = {entry["step"]: entry[EVAL_LOSS_KEY] for entry in state.log_history if EVAL_LOSS_KEY in entry}
    return {step: loss for step, loss in found.items() if math.isfinite(loss)}
