"""What a run has used, over all its restarts, and how fast it is: seconds, memory, the time that checkpoints stop it for.

None of it decides a number of the model, and none of it enters a digest of what is published.
"""

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from recipes.architecture import Architecture
from recipes.gpus import gpu_named
from recipes.recipe import Recipe
from recipes.schema import BadConfiguration, Frozen
from recipes.throughput import flops_per_token

USAGE = "usage.json"
"""The file of a checkpoint that says what the run had used by then."""
SIXTEEN_BITS = ("float16", "bfloat16")


class Usage(Frozen):
    """Times in seconds: `training` of the loop, evaluations and checkpoints included; `checkpoints` of those alone."""

    training: float = 0.0
    checkpoints: float = 0.0
    longest_checkpoint: float = 0.0
    num_checkpoints: int = 0
    peak_memory: int = 0

    @property
    def checkpoint_share(self) -> float:
        """The share of the training time in which the loop stood still for a checkpoint."""
        return self.checkpoints / self.training if self.training else 0.0


class Meter:
    """Counts on from what the checkpoint says that a run resumes from."""

    def __init__(self, resume: tuple[int, Path] | None) -> None:
        self._before = Usage.model_validate_json((resume[1] / USAGE).read_bytes()) if resume else Usage()
        self._stalls: list[float] = []
        self._started = time.monotonic()

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """The loop stands still for a checkpoint while the block runs."""
        started = time.monotonic()
        yield
        self._stalls.append(time.monotonic() - started)

    @property
    def newest_stall(self) -> float | None:
        return self._stalls[-1] if self._stalls else None

    def read(self) -> Usage:
        return Usage(
            training=self._before.training + time.monotonic() - self._started,
            checkpoints=self._before.checkpoints + sum(self._stalls),
            longest_checkpoint=max([self._before.longest_checkpoint, *self._stalls]),
            num_checkpoints=self._before.num_checkpoints + len(self._stalls),
            peak_memory=max(self._before.peak_memory, peak_memory()),
        )


def peak_memory() -> int:
    """The most bytes that this process has held: on the GPU where it trains on one, else of the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


@dataclass(frozen=True)
class Work:
    """Of one step: `tokens`, padding included, and the operations they cost; `peak` operations a second of all processes.

    `flops` is none for a model whose shape is not known, `peak` where that of the hardware is not: a CPU, an unknown GPU, or
    arithmetic other than that of 16 bits, of which `recipes.gpus` speaks.
    """

    tokens: int
    flops: float | None
    peak: float | None

    def speed(self, seconds: float) -> dict[str, float]:
        """What a step of so many seconds means, by the name of the metric."""
        found = {"train/tokens_per_second": self.tokens / seconds}
        if self.flops and self.peak:
            found["train/mfu"] = self.flops / seconds / self.peak
        return found


def work_of_step(recipe: Recipe, model: Path) -> Work:
    """Of a recipe with the base model in that folder."""
    try:
        shape = Architecture.from_config(json.loads((model / "config.json").read_text()))
        flops = flops_per_token(recipe, shape) * recipe.tokens_per_step
    except BadConfiguration:  # a family, or an adapter's target, that is not known here
        flops = None
    gpu = gpu_named(recipe.hardware.gpu_type) if recipe.hardware.gpus and torch.cuda.is_available() else None
    peak = gpu.flops * recipe.processes if gpu and recipe.computing_dtype in SIXTEEN_BITS else None
    return Work(recipe.tokens_per_step, flops, peak)
