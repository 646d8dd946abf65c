"""Why training ends before its last step: it was asked to, and saves a checkpoint; or it diverged, and saves none."""

import signal
from collections.abc import Sequence
from types import FrameType

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes.divergence import Band, Divergence, DivergencePolicy
from recipes.incidents import OutOfMemory
from recipes.runner import say
from recipes.training.group import Group


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """SIGTERM -> finish the step, save a checkpoint, stop (row I1, `save_on_preempt`). An evaluation asks in between."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._signalled = False
        self._agreed = False

    @property
    def requested(self) -> bool:
        return self._signalled or self._agreed

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def asked(self) -> bool:
        """Whether one of the processes was asked to stop. All call it at the same time: one may hear of it before others.

        A signal that comes while they tell each other counts the next time: all must answer the same now, and when the
        answer took its place, a run that was asked to stop went on to its last step.
        """
        self._agreed = self.group.any(self._signalled)
        return self._agreed

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        if self.asked():
            say("asked to stop: saving a checkpoint first")
            control.should_save = True
            control.should_training_stop = True
        return control


class StopToRepeat(TrainerCallback):  # type: ignore[misc]
    """Of a replay: stop with a checkpoint where the run that it repeats went on in smaller micro-batches."""

    def __init__(self, repeats: Sequence[OutOfMemory]) -> None:
        self._steps = {incident.after for incident in repeats}
        self.reached = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        if state.global_step in self._steps:
            self.reached = control.should_save = control.should_training_stop = True
        return control


class StopOnDivergence(TrainerCallback):  # type: ignore[misc]
    """A loss that left its band -> stop at once (row Y7). `found` says what happened.

    The band is made of the losses in the trainer's state, which a checkpoint holds: a resumed run decides as one that
    nobody killed.
    """

    def __init__(self, policy: DivergencePolicy) -> None:
        self._policy = policy
        self._band = Band(policy)
        self.found: Divergence | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        for entry in state.log_history:
            if "loss" in entry:
                self._band.add(entry["step"], entry["loss"])

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> TrainerControl:
        if logs and "loss" in logs and self.found is None:
            self.found = self._band.add(state.global_step, logs["loss"])
        if self.found:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
        return control
