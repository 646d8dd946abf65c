"""Meter a run's GPU time, memory, throughput and checkpoint stalls."""

import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes.contracts.job import BadConfiguration, Job
from recipes.contracts.recipe import Recipe
from recipes.contracts.results import Usage, write_usage
from recipes.machine import read_machine
from recipes.planning.architecture import Architecture
from recipes.planning.gpus import find_device_peak
from recipes.planning.throughput import estimate_flops_per_token
from recipes.storage.artifact_store import Store
from recipes.training.metrics.metric_names import MFU, TOKENS_PER_SECOND

WRITE_INTERVAL_SECONDS = 60.0
"""How much of a process is not counted at most when it dies, besides the step that it was in."""
HALF_PRECISION = ("float16", "bfloat16")


class UsageMeter:
    """Counts on, on so many GPUs, from what the run had used before this process; they are held since it `began`."""

    def __init__(self, before: Usage, gpus: int, began: float | None = None) -> None:
        self._previous = before
        self._num_gpus = gpus
        self._machine = read_machine()
        self._stalls: list[float] = []
        self._peak = before.peak_memory
        self._started_at = time.monotonic()
        self._held_since = self._started_at if began is None else began

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """The loop stands still for a checkpoint while the block runs."""
        started = time.monotonic()
        yield
        self._stalls.append(time.monotonic() - started)

    @property
    def last_stall_seconds(self) -> float | None:
        return self._stalls[-1] if self._stalls else None

    def record_peaks(self, peak_bytes: Sequence[int]) -> None:
        """What each process of the run has held at most so far: they hold other parts of a model, and other rows."""
        self._peak = max(self._peak, *peak_bytes)

    def read(self, state: TrainerState) -> Usage:
        """By the end of the step that training stands at."""
        now = time.monotonic()
        return Usage(
            seconds=self._previous.seconds + now - self._started_at,
            gpus=self._num_gpus,
            gpu_seconds=self._previous.gpu_seconds + (now - self._held_since) * self._num_gpus,
            checkpoints=self._previous.checkpoints + sum(self._stalls),
            longest_checkpoint=max([self._previous.longest_checkpoint, *self._stalls]),
            num_checkpoints=self._previous.num_checkpoints + len(self._stalls),
            peak_memory=max(self._peak, peak_memory_bytes()),
            steps=state.global_step,
            tokens=state.num_input_tokens_seen,
            machine=self._machine,
        )


class UsageWriter(TrainerCallback):  # type: ignore[misc]
    """Into the store: with each checkpoint, once a minute in between, and when the loop is over.

    In the background: no run waits for that.
    """

    def __init__(self, meter: UsageMeter, store: Store, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter, self._store, self._folder, self._clock = meter, store, folder, clock
        self._written_at = clock()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="usage")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self._clock() - self._written_at >= WRITE_INTERVAL_SECONDS:
            self._write(state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._write(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._write(state)

    def _write(self, state: TrainerState) -> None:
        self._written_at = self._clock()
        self._writer.submit(write_usage, self._store, self._folder, self._meter.read(state))


def count_held_gpus(job: Job) -> int:
    """On all nodes, as many of those that the job asks for as are there: on a processor it may train without any."""
    nodes = job.distributed.num_nodes if job.distributed else 1
    return min(job.hardware.gpus, torch.cuda.device_count()) * nodes


def peak_memory_bytes() -> int:
    """The most bytes that this process has held: on the GPU where it trains on one, else of the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


@dataclass(frozen=True)
class TokenCost:
    """Of one token: the operations it costs, without those that are done twice to save memory (PaLM, appendix B); `peak`
    operations a second of all processes.

    `flops` is none for a model whose shape is not known, `peak` where that of the hardware is not: a CPU, an unknown GPU, or
    arithmetic other than that of 16 bits, of which `recipes.planning.gpus` speaks.
    """

    flops: float | None
    peak: float | None

    def throughput_metrics(self, tokens: int, seconds: float) -> dict[str, float]:
        """What a step of so many tokens in so many seconds means, by the name of the metric."""
        found = {TOKENS_PER_SECOND: tokens / seconds}
        if self.flops and self.peak:
            found[MFU] = tokens * self.flops / seconds / self.peak
        return found


def token_cost(recipe: Recipe, model: Path) -> TokenCost:
    """Of a recipe with the base model in that folder."""
    try:
        shape = Architecture.from_config(json.loads((model / "config.json").read_text(encoding="utf-8")))
        flops = estimate_flops_per_token(recipe, shape, recomputed=False)
    except BadConfiguration:  # a family, or an adapter's target, that is not known here
        flops = None
    peak = None
    if recipe.hardware.gpus and torch.cuda.is_available() and recipe.computing_dtype in HALF_PRECISION:
        # Of what is there: where no cluster sees to it, that may be another type than the recipe asks for.
        peak = find_device_peak(torch.cuda.get_device_name())
    return TokenCost(flops, peak and peak * recipe.processes)
