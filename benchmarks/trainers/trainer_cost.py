"""Run a program unchanged and record the cost of its training.

Usage: python -m benchmarks.trainers.trainer_cost REPORT THREADS MODULE [ARGUMENTS]

All programs here train with transformers' Trainer, so measurements start and end at the same points: they include
optimizer, logging and checkpoints, but not reading records and loading weights. On a GPU the first steps are excluded,
because they select, compile and load kernels.
"""

import json
import resource
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WARM_UP = 3
"""Steps on a GPU before the clock starts."""


class Clock:
    """Processor-seconds and seconds of training after the warm-up."""

    def __init__(self) -> None:
        import torch

        self.on_gpu = torch.cuda.is_available()
        self.stalls: list[float] = []
        self.steps, self.warm_up = 0, 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.cpu, self.began = self.now()
        self.started = self.began

    def now(self) -> tuple[float, float]:
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()
        return time.process_time(), time.perf_counter()

    def step_done(self) -> None:
        self.steps += 1
        if self.on_gpu and self.steps == WARM_UP:
            self.warm_up, self.stalls = WARM_UP, []
            self.cpu, self.began = self.now()

    def read(self) -> dict[str, float]:
        """Return the fields of `Cost`.

        `share` is the share of measured steps, `start` the seconds before them.
        """
        import torch

        if self.steps <= self.warm_up:
            raise SystemExit(f"{self.steps} steps are too few to measure: raise --records")
        cpu, now = self.now()
        seconds = now - self.began
        gpu = torch.cuda.max_memory_allocated() / 1e6 if self.on_gpu else 0.0
        return {
            "cpu": cpu - self.cpu,
            "seconds": seconds,
            "stall": sum(self.stalls) / seconds,
            "memory": gpu or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
            "share": 1 - self.warm_up / self.steps,
            "start": self.began - self.started,
        }


@contextmanager
def measure_training(report: Path) -> Iterator[Clock]:
    """Write the cost of the training inside; the caller reports each step to the clock."""
    clock = Clock()
    yield clock
    report.write_text(json.dumps(clock.read()))


def measure_trainers(report: Path) -> None:
    """Patch `Trainer.train` to measure training and each checkpoint."""
    from transformers import Trainer, TrainerCallback

    train = Trainer.train

    class TellSteps(TrainerCallback):  # type: ignore[misc]
        def __init__(self, clock: Clock) -> None:
            self.clock = clock

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.clock.step_done()

    def measured(self: Any, *arguments: Any, **named: Any) -> Any:
        save = self._save_checkpoint
        with measure_training(report) as clock:

            def timed(*given: Any, **options: Any) -> None:
                began = time.perf_counter()
                save(*given, **options)
                clock.stalls.append(time.perf_counter() - began)

            self._save_checkpoint = timed
            self.add_callback(TellSteps(clock))
            return train(self, *arguments, **named)

    Trainer.train = measured


def main() -> None:
    report, threads, module, *arguments = sys.argv[1:]
    import torch

    torch.set_num_threads(int(threads))
    measure_trainers(Path(report))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
