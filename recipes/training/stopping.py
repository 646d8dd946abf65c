"""Callbacks that end training early, on SIGTERM, on divergence or for a replay."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes.contracts.recovery_log import OutOfMemory, RecoveryEvent, find_final_divergences
from recipes.runner import log_line
from recipes.training.determinism import RandomStates
from recipes.training.divergence import StopOnDivergence
from recipes.training.parallel.process_group import ProcessGroup


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """SIGTERM -> break the step off, save a checkpoint of the one before, stop (row I1). An evaluation asks in between.

    A step may be longer than the grace (zen-72b-full: 8 minutes), so that nothing waits for the end of one that has
    micro-batches to go: its gradients are thrown away with the process, and whoever resumes does it from its first row and
    its first random number. What it took counts as training time all the same. That is sound with DeepSpeed too: its engine,
    which has reduced a part of them, is not gone on with, and what a checkpoint takes of it only `engine.step` changes.

    Without `saves` (`CheckpointPolicy.save_on_preempt`) no checkpoint is saved for that: what is due by then, is. Neither is
    one of weights that a checkpoint has already, or that are those of the beginning.
    """

    _before_step: RandomStates

    def __init__(self, group: ProcessGroup, *, saves: bool) -> None:
        self.group = group
        self._saves = saves
        self._saved_step = 0
        self._signal_received = False
        self._stop_agreed = False

    @property
    def is_requested(self) -> bool:
        return self._signal_received or self._stop_agreed

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._saved_step = state.global_step
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._signal_received = True

    def any_stop_requested(self) -> bool:
        """Whether one of the processes was asked to stop. All call it at the same time: one may hear of it before others.

        A signal that comes while they tell each other counts the next time: all must answer the same now, and when the
        answer took its place, a run that was asked to stop went on to its last step.
        """
        self._stop_agreed = self.group.any(self._signal_received)
        return self._stop_agreed

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._saved_step = state.global_step

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if args.gradient_accumulation_steps > 1 or self.group.is_pipelined:
            self._before_step = RandomStates.capture()

    def on_substep_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        **kwargs: object,
    ) -> TrainerControl:
        """After every micro-batch of a step but its last; of stages, after a step that was broken off."""
        if self.any_stop_requested():
            self._before_step.restore()
            model.zero_grad()  # the checkpoint may need their memory; FSDP2 keeps what it has not reduced yet
            self.stop(control, f"asked to stop: step {state.global_step + 1} is broken off", state.global_step)
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        if self.any_stop_requested():
            self.stop(control, "asked to stop", state.global_step)
        return control

    def stop(self, control: TrainerControl, reason: str, step: int) -> None:
        """With the weights after `step`."""
        control.should_save |= self._saves and step != self._saved_step
        control.should_training_stop = True
        log_line(f"{reason}: {'saving a checkpoint first' if control.should_save else 'no checkpoint is due'}")


class StopForReplay(TrainerCallback):  # type: ignore[misc]
    """Of a replay: stop with a checkpoint where the run that it repeats went on in smaller micro-batches.

    And save one where that run went back to when it ended: its weights are those that it left.
    """

    def __init__(self, repeats: Sequence[RecoveryEvent]) -> None:
        self._smaller_batch_after = {incident.after for incident in repeats if isinstance(incident, OutOfMemory)}
        self._rollback_steps = {incident.rolled_back_to for incident in find_final_divergences(repeats)}
        self.reached = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        if state.global_step in self._smaller_batch_after:
            self.reached = control.should_save = control.should_training_stop = True
        if state.global_step in self._rollback_steps:
            control.should_save = True
        return control


@dataclass(frozen=True)
class StopCallbacks:
    """Each of them, as callbacks of one training."""

    signal: StopOnSignal
    divergence: StopOnDivergence
    repeat: StopForReplay
