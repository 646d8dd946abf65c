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
"""Upper bound of the usage that is lost when a process dies, in addition to its current step."""
HALF_PRECISION = ("float16", "bfloat16")


class UsageMeter:
    """Adds this process's usage on `gpus` GPUs, held since `began`, to the usage `before` it."""

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
        """Time the block as a stall of the training loop by a checkpoint."""
        started = time.monotonic()
        yield
        self._stalls.append(time.monotonic() - started)

    @property
    def last_stall_seconds(self) -> float | None:
        return self._stalls[-1] if self._stalls else None

    def record_peaks(self, peak_bytes: Sequence[int]) -> None:
        """Record the peak memory of each process so far; they hold different shards and rows."""
        self._peak = max(self._peak, *peak_bytes)

    def read(self, state: TrainerState) -> Usage:
        """Return the usage up to the end of the current step."""
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
    """Store the usage with each checkpoint, every minute, and at the end of training.

    Written in the background, so that training never waits for it.
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
    """Return the number of requested GPUs that exist, over all nodes."""
    nodes = job.distributed.num_nodes if job.distributed else 1
    return min(job.hardware.gpus, torch.cuda.device_count()) * nodes


def peak_memory_bytes() -> int:
    """Return this process's peak memory in bytes, on its GPU or else the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


@dataclass(frozen=True)
class TokenCost:
    """FLOPs per token, and the hardware's peak in FLOP/s over all processes.

    `flops` excludes recomputation for activation checkpointing (PaLM, appendix B), and is None for an unknown architecture.
    `peak` is None for unknown hardware: a CPU, an unknown GPU, or arithmetic other than 16 bit (`recipes.planning.gpus`).
    """

    flops: float | None
    peak: float | None

    def throughput_metrics(self, tokens: int, seconds: float) -> dict[str, float]:
        """Return tokens per second and, if known, MFU of a step."""
        found = {TOKENS_PER_SECOND: tokens / seconds}
        if self.flops and self.peak:
            found[MFU] = tokens * self.flops / seconds / self.peak
        return found


def token_cost(recipe: Recipe, model: Path) -> TokenCost:
    """Estimate the cost per token of a recipe with the base model in folder `model`."""
    try:
        shape = Architecture.from_config(json.loads((model / "config.json").read_text(encoding="utf-8")))
        flops = estimate_flops_per_token(recipe, shape, recomputed=False)
    except BadConfiguration:  # unknown architecture or adapter target
        flops = None
    peak = None
    if recipe.hardware.gpus and torch.cuda.is_available() and recipe.computing_dtype in HALF_PRECISION:
        # Of the GPU that is present: without a cluster's scheduler it may differ from the recipe's.
        peak = find_device_peak(torch.cuda.get_device_name())
    return TokenCost(flops, peak and peak * recipe.processes)
