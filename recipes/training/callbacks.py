"""What happens between two steps: checkpoints when they are due, a stop when it is asked for, metrics to the tracker.

Each acts only at the end of a step, where weights, optimizer and data position agree.
"""

import math
import signal
import time
from types import FrameType

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hanzo_ml.buffer import MetricBuffer
from recipes.runner import say
from recipes.schema import CheckpointPolicy, seconds_of

NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "eval_loss": "eval/loss",
    "reward_accuracy": "train/reward_accuracy",
    "reward_margin": "train/reward_margin",
    "eval_reward_accuracy": "eval/reward_accuracy",
    "eval_reward_margin": "eval/reward_margin",
}


class CheckpointWhenDue(TrainerCallback):  # type: ignore[misc]
    """Time or steps, whichever comes first, and always at the end (specification rows I1, I6)."""

    def __init__(self, policy: CheckpointPolicy) -> None:
        self.interval = seconds_of(policy.interval)
        self.interval_steps = policy.interval_steps
        self.saved_at = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        late = time.monotonic() - self.saved_at >= self.interval
        if late or state.global_step % self.interval_steps == 0 or state.global_step >= state.max_steps:
            self.saved_at = time.monotonic()
            control.should_save = True
        return control


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """SIGTERM -> finish the step, save a checkpoint, stop (row I1, `save_on_preempt`)."""

    def __init__(self) -> None:
        self.requested = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        if self.requested:
            say("asked to stop: saving a checkpoint first")
            control.should_save = True
            control.should_training_stop = True
        return control


class LogToTracking(TrainerCallback):  # type: ignore[misc]
    """Every logged number to the run under the specification's names (row E3), and one line of progress to the log."""

    def __init__(self, metrics: MetricBuffer) -> None:
        self.metrics = metrics

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        named = {NAMES[key]: value for key, value in (logs or {}).items() if key in NAMES}
        if "eval/loss" in named:
            named["eval/perplexity"] = math.exp(min(named["eval/loss"], 700.0))
        now = time.time_ns() // 1_000_000
        for key, value in named.items():
            self.metrics.add(key, float(value), state.global_step, now)
        if "train/loss" in named:
            say(f"step {state.global_step}/{state.max_steps} loss {named['train/loss']:.4f}")
        elif "eval/loss" in named:
            say(f"step {state.global_step}/{state.max_steps} eval loss {named['eval/loss']:.4f}")
