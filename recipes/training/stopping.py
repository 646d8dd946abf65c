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
    """On SIGTERM, abort the current step, save a checkpoint of the previous one, and stop.

    A step may take longer than the grace period (zen-72b-full: 8 minutes), so a step with remaining micro-batches is
    aborted: its gradients are discarded, and the resumed run repeats it from its first row with the same random numbers. The
    time spent still counts as training time. An evaluation checks for the signal between micro-batches. Aborting is safe
    with DeepSpeed too: the engine, which has reduced some gradients, is not used again, and only `engine.step` changes what
    a checkpoint reads from it.

    Without `saves` (`CheckpointPolicy.save_on_preempt`) only a checkpoint that is due anyway is saved. Weights that a
    checkpoint has already, and initial weights, are never saved.
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
        """Return whether any process has received a stop signal. All processes must call it together.

        A signal that arrives during the exchange counts at the next call, so that all processes get the same answer. When
        the result overwrote `_signal_received`, such a signal was lost and the run trained to its last step.
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
        """Runs after all micro-batches but the last; in a pipeline, after an aborted step."""
        if self.any_stop_requested():
            self._before_step.restore()
            model.zero_grad()  # frees memory for the checkpoint; FSDP2 keeps gradients that are not reduced yet
            self.stop(control, f"stop requested: step {state.global_step + 1} aborted", state.global_step)
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        if self.any_stop_requested():
            self.stop(control, "stop requested", state.global_step)
        return control

    def stop(self, control: TrainerControl, reason: str, step: int) -> None:
        """Stop training; save the weights after `step` unless they are saved already."""
        control.should_save |= self._saves and step != self._saved_step
        control.should_training_stop = True
        log_line(f"{reason}: {'saving a checkpoint first' if control.should_save else 'no checkpoint is due'}")


class StopForReplay(TrainerCallback):  # type: ignore[misc]
    """Stop a replay with a checkpoint where the original run restarted with smaller micro-batches.

    Also save a checkpoint where the original run rolled back to at its end: it published those weights.
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
    """The callbacks of one training run that can end it."""

    signal: StopOnSignal
    divergence: StopOnDivergence
    repeat: StopForReplay
