"""Detect a diverged loss: not finite, or above its running band for many steps."""

import math
from dataclasses import dataclass
from statistics import median

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes.contracts.divergence import DivergencePolicy

WARMUP_LOSSES = 20
"""Number of losses after which the band uses the running mean and deviation."""
MEDIAN_LOSSES, MEDIAN_BAND_FACTOR = 5, 2.0
"""Before that, the band is the median of this many losses plus this multiple of the policy's band.

With defaults the limit is 2.2 times the initial model's loss; Lightning's `SpikeDetection` uses twice the running loss.
The loss increase during learning-rate warmup (Gupta et al. 2023) is far smaller, and a median is robust to a single odd
batch. Without this limit a run that diverged within its first updates was trained to its end.
"""
MEAN_DECAY = 0.95
"""Decay of the running mean: about 20 steps contribute."""
MIN_DEVIATION_SHARE, MIN_DEVIATION_NATS = 0.2, 0.1
"""Lower bounds of the deviation, as a share of the mean and in nats: a smooth loss may fluctuate that much."""


@dataclass(frozen=True)
class Divergence:
    """A detected divergence.

    Attributes:
        first: first step with a bad loss.
        noticed: step at which the divergence was certain.
        reason: explanation for the user.
    """

    first: int
    noticed: int
    reason: str


class LossBand:
    """Running mean and deviation of the losses within the band; add losses in order."""

    def __init__(self, policy: DivergencePolicy) -> None:
        self._policy = policy
        self._count = 0
        self._first: list[float] = []
        self._mean = 0.0
        self._variance = 0.0
        self.above_since: int | None = None
        """First step of the current streak of losses above the band; None if the latest loss was within it."""

    @property
    def limit(self) -> float:
        """The highest loss within the band; infinite for the first `MEDIAN_LOSSES` losses.

        During those only a non-finite loss counts as a divergence.
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
    """Stop training at once when the loss diverges. `detected` holds the divergence.

    The band is rebuilt from the losses in the trainer's state, which checkpoints contain: a resumed run decides exactly as
    an uninterrupted one.
    """

    def __init__(self, policy: DivergencePolicy) -> None:
        self._policy = policy
        self._band = LossBand(policy)
        self.detected: Divergence | None = None

    @property
    def doubted_since(self) -> int | None:
        """First step of the current streak above the band, a possible divergence."""
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
