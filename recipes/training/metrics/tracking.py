"""Log metrics to the tracking server; checkpoints include unacknowledged points."""

import json
import math
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hanzo_ml.client.buffer import MetricBuffer
from hanzo_ml.client.points import Point
from hanzo_ml.client.repeated_steps import RepeatedSteps
from recipes.contracts.job import BadConfiguration, Job
from recipes.runner import log_line
from recipes.training.metrics.metric_names import CHECKPOINT_SECONDS, PERPLEXITY, TRANSFORMERS_NAMES
from recipes.training.metrics.usage import TokenCost, UsageMeter

# Metrics on their way to the tracking server. Points it has not acknowledged are part of every checkpoint.

PENDING_METRICS_PREFIX = "pending_metrics"
"""Prefix of the file in a checkpoint that holds unacknowledged points."""


def write_pending_metrics(points: Sequence[Point], folder: Path) -> None:
    """Write unacknowledged points into a checkpoint, under a name that contains their hash.

    So that equal names have equal bytes, whichever process saves a step: a request of a killed program once arrived after
    its successor had saved the same step, which changed one file of a checkpoint that was complete.
    """
    data = json.dumps([point.to_json() for point in points]).encode()
    (folder / f"{PENDING_METRICS_PREFIX}-{sha256(data).hexdigest()[:16]}.json").write_bytes(data)


def read_pending_metrics(folder: Path) -> list[Point]:
    """Read the unacknowledged points in a checkpoint."""
    (file,) = folder.glob(f"{PENDING_METRICS_PREFIX}*.json")
    return [Point.from_json(point) for point in json.loads(file.read_bytes())]


def open_metric_buffer(
    job: Job, resume: tuple[int, Path] | None, repeated: Sequence[RepeatedSteps], *, evaluates_on_resume: bool
) -> MetricBuffer:
    """Open the metric buffer.

    It resends what the previous attempt could not send and skips what the server has. The previous attempt may have been
    killed before its first checkpoint: then the run restarts and the server is ahead.

    Args:
        repeated: steps to log again; after a divergence they are computed on other samples.
        evaluates_on_resume: the run first logs at the step of its checkpoint, as a previous attempt may have done shortly
            before it was killed.
    """
    if job.tracking is None:
        raise BadConfiguration("a training job needs `tracking`: the run that it logs to")
    metrics = MetricBuffer(job.tracking.uri, job.tracking.run_id)
    pending = read_pending_metrics(resume[1]) if resume else []
    metrics.skip_until(resume[0] - evaluates_on_resume if resume else 0, repeated, pending=pending)
    return metrics


# Logging per step: to the tracking server under the specification's names, and a progress line in the log.

OBJECTIVE_PREFIXES = ("train/", "eval/")
"""Prefixes of an objective's metrics. Matching the built-in metrics' names instead once dropped those of custom objectives.
"""


class TrackingCallback(TrainerCallback):  # type: ignore[misc]
    """Send logged numbers to the run under the specification's names, and write one progress line.

    A step starts at the end of the previous one, or of what followed it: waiting for its rows is part of it.
    """

    def __init__(self, metrics: MetricBuffer, work: TokenCost, meter: UsageMeter, *, has_perplexity: bool) -> None:
        self.metrics = metrics
        self.work = work
        self.meter = meter
        self.has_perplexity = has_perplexity
        self._step_started_at = time.monotonic()
        self._tokens_seen = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._step_started_at = time.monotonic()
        self._tokens_seen = state.num_input_tokens_seen

    def on_evaluate(self, *args: object, **kwargs: object) -> None:
        self._step_started_at = time.monotonic()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._step_started_at = time.monotonic()
        if self.meter.last_stall_seconds is not None:
            self.metrics.add(CHECKPOINT_SECONDS, self.meter.last_stall_seconds, state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        names = TRANSFORMERS_NAMES
        named = {
            names.get(key, key): value
            for key, value in (logs or {}).items()
            if key in names or key.startswith(OBJECTIVE_PREFIXES)
        }
        if "eval/loss" in named and self.has_perplexity:
            named[PERPLEXITY] = math.exp(min(named["eval/loss"], 700.0))
        if "train/loss" in named:  # the loss was read from the device, so the step has finished
            before, self._step_started_at = self._step_started_at, time.monotonic()
            tokens, self._tokens_seen = state.num_input_tokens_seen - self._tokens_seen, state.num_input_tokens_seen
            named |= self.work.throughput_metrics(tokens, self._step_started_at - before)
        now = time.time_ns() // 1_000_000
        for key, value in named.items():
            self.metrics.add(key, float(value), state.global_step, now)
        if "train/loss" in named:
            log_line(f"step {state.global_step}/{state.max_steps} loss {named['train/loss']:.4f}")
        elif "eval/loss" in named:
            log_line(f"step {state.global_step}/{state.max_steps} eval loss {named['eval/loss']:.4f}")
