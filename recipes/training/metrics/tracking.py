"""Log metrics to the tracking server; unacknowledged points go into checkpoints."""

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

# The metrics of a run on their way to the tracking server; what it has not acknowledged is part of every checkpoint.

PENDING_METRICS_PREFIX = "pending_metrics"
"""How the name of the file begins that has them."""


def write_pending_metrics(points: Sequence[Point], folder: Path) -> None:
    """Into a checkpoint. The name says what is in it, and with that a checkpoint of a step has the same bytes under the same
    names whoever saves it.

    A program that was killed had a request on its way still, which arrived after the run had been started anew, and saved
    that step once more: of a checkpoint that was whole, one file was another then.
    """
    data = json.dumps([point.to_json() for point in points]).encode()
    (folder / f"{PENDING_METRICS_PREFIX}-{sha256(data).hexdigest()[:16]}.json").write_bytes(data)


def read_pending_metrics(folder: Path) -> list[Point]:
    """Of a checkpoint."""
    (file,) = folder.glob(f"{PENDING_METRICS_PREFIX}*.json")
    return [Point.from_json(point) for point in json.loads(file.read_bytes())]


def open_metric_buffer(
    job: Job, resume: tuple[int, Path] | None, repeated: Sequence[RepeatedSteps], *, evaluates_on_resume: bool
) -> MetricBuffer:
    """The buffer to log into; it knows what a predecessor could not send, and leaves out what the server has already.

    A predecessor may have been killed before its first checkpoint: then the run begins anew, and the server is ahead.

    Steps in `repeated` are logged once more: after a divergence they are done on other samples. A run that
    `evaluates_on_resume` logs at the step of its checkpoint, as a predecessor may have done that was killed soon after.
    """
    if job.tracking is None:
        raise BadConfiguration("a training job needs `tracking`: the run that it logs to")
    metrics = MetricBuffer(job.tracking.uri, job.tracking.run_id)
    pending = read_pending_metrics(resume[1]) if resume else []
    metrics.skip_until(resume[0] - evaluates_on_resume if resume else 0, repeated, pending=pending)
    return metrics


# What a run logs at each step: to the tracker under the specification's names, and as a line of progress.

OBJECTIVE_PREFIXES = ("train/", "eval/")
"""How the names begin of what an objective tells, whatever it calls it: of others' only what ours tell was logged once."""


class TrackingCallback(TrainerCallback):  # type: ignore[misc]
    """Every logged number to the run under the specification's names (row E3), and one line of progress to the log.

    A step begins where the one before ended, or what came after that: to wait for its rows is a part of it.
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
        if "train/loss" in named:  # read from the device by now, so that the step is over
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
