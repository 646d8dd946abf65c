"""What a run has used, over all its restarts, and how fast it is: seconds, memory, the time that checkpoints stop it for.

None of it decides a number of the model, and none of it enters a digest of what is published.
"""

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
from recipes.machine import read_machine
from recipes.planning.architecture import Architecture
from recipes.planning.gpus import peak_of_device
from recipes.planning.throughput import flops_per_token
from recipes.storage.artifact_store import Store
from recipes.training.metrics.metric_names import MFU, TOKENS_PER_SECOND
from recipes.usage import Usage, write_usage

EVERY_SECONDS = 60.0
"""How much of a process is not counted at most when it dies, besides the step that it was in."""
SIXTEEN_BITS = ("float16", "bfloat16")


class Meter:
    """Counts on, on so many GPUs, from what the run had used before this process; they are held since it `began`."""

    def __init__(self, before: Usage, gpus: int, began: float | None = None) -> None:
        self._before = before
        self._gpus = gpus
        self._machine = read_machine()
        self._stalls: list[float] = []
        self._peak = before.peak_memory
        self._started = time.monotonic()
        self._began = self._started if began is None else began

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """The loop stands still for a checkpoint while the block runs."""
        started = time.monotonic()
        yield
        self._stalls.append(time.monotonic() - started)

    @property
    def newest_stall(self) -> float | None:
        return self._stalls[-1] if self._stalls else None

    def learn_peaks(self, bytes_of_processes: Sequence[int]) -> None:
        """What each process of the run has held at most so far: they hold other parts of a model, and other rows."""
        self._peak = max(self._peak, *bytes_of_processes)

    def read(self, state: TrainerState) -> Usage:
        """By the end of the step that training stands at."""
        now = time.monotonic()
        return Usage(
            seconds=self._before.seconds + now - self._started,
            gpus=self._gpus,
            gpu_seconds=self._before.gpu_seconds + (now - self._began) * self._gpus,
            checkpoints=self._before.checkpoints + sum(self._stalls),
            longest_checkpoint=max([self._before.longest_checkpoint, *self._stalls]),
            num_checkpoints=self._before.num_checkpoints + len(self._stalls),
            peak_memory=max(self._peak, peak_memory()),
            steps=state.global_step,
            tokens=state.num_input_tokens_seen,
            machine=self._machine,
        )


class WriteUsage(TrainerCallback):  # type: ignore[misc]
    """Into the store: with each checkpoint, once a minute in between, and when the loop is over.

    In the background: no run waits for that.
    """

    def __init__(self, meter: Meter, store: Store, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter, self._store, self._folder, self._clock = meter, store, folder, clock
        self._written_at = clock()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="usage")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self._clock() - self._written_at >= EVERY_SECONDS:
            self._write(state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._write(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._write(state)

    def _write(self, state: TrainerState) -> None:
        self._written_at = self._clock()
        self._writer.submit(write_usage, self._store, self._folder, self._meter.read(state))


def gpus_held(job: Job) -> int:
    """On all nodes, as many of those that the job asks for as are there: on a processor it may train without any."""
    nodes = job.distributed.num_nodes if job.distributed else 1
    return min(job.hardware.gpus, torch.cuda.device_count()) * nodes


def peak_memory() -> int:
    """The most bytes that this process has held: on the GPU where it trains on one, else of the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


@dataclass(frozen=True)
class Work:
    """Of one token: the operations it costs, without those that are done twice to save memory (PaLM, appendix B); `peak`
    operations a second of all processes.

    `flops` is none for a model whose shape is not known, `peak` where that of the hardware is not: a CPU, an unknown GPU, or
    arithmetic other than that of 16 bits, of which `recipes.planning.gpus` speaks.
    """

    flops: float | None
    peak: float | None

    def speed(self, tokens: int, seconds: float) -> dict[str, float]:
        """What a step of so many tokens in so many seconds means, by the name of the metric."""
        found = {TOKENS_PER_SECOND: tokens / seconds}
        if self.flops and self.peak:
            found[MFU] = tokens * self.flops / seconds / self.peak
        return found


def work_of_token(recipe: Recipe, model: Path) -> Work:
    """Of a recipe with the base model in that folder."""
    try:
        shape = Architecture.from_config(json.loads((model / "config.json").read_text()))
        flops = flops_per_token(recipe, shape, recomputed=False)
    except BadConfiguration:  # a family, or an adapter's target, that is not known here
        flops = None
    peak = None
    if recipe.hardware.gpus and torch.cuda.is_available() and recipe.computing_dtype in SIXTEEN_BITS:
        # Of what is there: where no cluster sees to it, that may be another type than the recipe asks for.
        peak = peak_of_device(torch.cuda.get_device_name())
    return Work(flops, peak and peak * recipe.processes)
