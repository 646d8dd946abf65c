"""What a run logs at each step: to the tracker under the specification's names, and as a line of progress."""

import math
import time

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hanzo_ml.client.buffer import MetricBuffer
from recipes.runner import say
from recipes.training.metrics.metric_names import CHECKPOINT_SECONDS, OF_TRANSFORMERS, PERPLEXITY
from recipes.training.metrics.usage import Meter, Work

TOLD = ("train/", "eval/")
"""How the names begin of what an objective tells, whatever it calls it: of others' only what ours tell was logged once."""


class LogToTracking(TrainerCallback):  # type: ignore[misc]
    """Every logged number to the run under the specification's names (row E3), and one line of progress to the log.

    A step begins where the one before ended, or what came after that: to wait for its rows is a part of it.
    """

    def __init__(self, metrics: MetricBuffer, work: Work, meter: Meter, *, has_perplexity: bool) -> None:
        self.metrics = metrics
        self.work = work
        self.meter = meter
        self.has_perplexity = has_perplexity
        self._began = time.monotonic()
        self._tokens = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._began = time.monotonic()
        self._tokens = state.num_input_tokens_seen

    def on_evaluate(self, *args: object, **kwargs: object) -> None:
        self._began = time.monotonic()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._began = time.monotonic()
        if self.meter.newest_stall is not None:
            self.metrics.add(CHECKPOINT_SECONDS, self.meter.newest_stall, state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        names = OF_TRANSFORMERS
        named = {names.get(key, key): value for key, value in (logs or {}).items() if key in names or key.startswith(TOLD)}
        if "eval/loss" in named and self.has_perplexity:
            named[PERPLEXITY] = math.exp(min(named["eval/loss"], 700.0))
        if "train/loss" in named:  # read from the device by now, so that the step is over
            before, self._began = self._began, time.monotonic()
            tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
            named |= self.work.speed(tokens, self._began - before)
        now = time.time_ns() // 1_000_000
        for key, value in named.items():
            self.metrics.add(key, float(value), state.global_step, now)
        if "train/loss" in named:
            say(f"step {state.global_step}/{state.max_steps} loss {named['train/loss']:.4f}")
        elif "eval/loss" in named:
            say(f"step {state.global_step}/{state.max_steps} eval loss {named['eval/loss']:.4f}")
