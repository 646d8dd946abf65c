"""Detect a diverged loss: not finite, or above its running band for many steps in a row (row Y7)."""

import math
from dataclasses import dataclass
from statistics import median

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes.contracts.divergence import DivergencePolicy

WARMUP_LOSSES = 20
"""Losses that make a band."""
MEDIAN_LOSSES, MEDIAN_BAND_FACTOR = 5, 2.0
"""Until then the middle one of so many losses stands for the mean, in a band so many times as wide.

By default that is a loss beyond 2.2 times that of the model which the run began with: Lightning's `SpikeDetection` takes
twice the running loss. What a loss gains while the learning rate warms up (Gupta et al. 2023) is far less, and no single odd
batch decides the middle one. A run that diverges within its first updates was trained to its end.
"""
MEAN_DECAY = 0.95
"""Share of the past in the running mean: some 20 steps count."""
MIN_DEVIATION_SHARE, MIN_DEVIATION_NATS = 0.2, 0.1
"""The deviation never counts as less than this share of the mean, and this many nats: a smooth loss may wobble."""


@dataclass(frozen=True)
class Divergence:
    """`first` is the first step with a bad loss, `noticed` the one at which it was certain."""

    first: int
    noticed: int
    reason: str


class LossBand:
    """The running mean and deviation of the losses within it, fed in the order of steps."""

    def __init__(self, policy: DivergencePolicy) -> None:
        self._policy = policy
        self._count = 0
        self._first: list[float] = []
        self._mean = 0.0
        self._variance = 0.0
        self.above_since: int | None = None
        """The step from which on all losses were above the band; none where the newest was within it."""

    @property
    def limit(self) -> float:
        """The highest loss that is within the band; infinite for the `MEDIAN_LOSSES` losses, of which only one not finite
        counts.
        """
        if self._count < MEDIAN_LOSSES:
            return math.inf
        if self._count < WARMUP_LOSSES:
            middle = median(self._first)
            return middle + MEDIAN_BAND_FACTOR * self._policy.band * max(
                MIN_DEVIATION_SHARE * abs(middle), MIN_DEVIATION_NATS
            )
        deviation = max(math.sqrt(self._variance), MIN_DEVIATION_SHARE * abs(self._mean), MIN_DEVIATION_NATS)
        return self._mean + self._policy.band * deviation

    def add(self, step: int, loss: float) -> Divergence | None:
        if not math.isfinite(loss):
            return Divergence(self.above_since or step, step, f"the loss of step {step} is {loss}")
        limit = self.limit
        if loss > limit:
            first = self.above_since = self.above_since or step
            if step - first + 1 < self._policy.patience:
                return None
            return Divergence(first, step, f"the loss was above {limit:.4f} from step {first} to {step} ({loss:.4f})")
        self.above_since = None
        if self._count < MEDIAN_LOSSES:
            self._first.append(loss)
        weight = max(1 - MEAN_DECAY, 1 / (self._count + 1))
        away = loss - self._mean
        self._mean += weight * away
        self._variance = (1 - weight) * (self._variance + weight * away * away)
        self._count += 1
        return None


class StopOnDivergence(TrainerCallback):  # type: ignore[misc]
    """A loss that left its band -> stop at once (row Y7). `detected` says what happened.

    The band is made of the losses in the trainer's state, which a checkpoint holds: a resumed run decides as one that
    nobody killed.
    """

    def __init__(self, policy: DivergencePolicy) -> None:
        self._policy = policy
        self._band = LossBand(policy)
        self.detected: Divergence | None = None

    @property
    def doubted_since(self) -> int | None:
        """The step from which on the loss was above its band, which may prove to be a divergence."""
        return self._band.above_since

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
        if logs and "loss" in logs and self.detected is None:
            self.detected = self._band.add(state.global_step, logs["loss"])
        if self.detected:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
        return control
