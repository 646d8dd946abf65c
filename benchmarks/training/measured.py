"""Usage: python -m benchmarks.training.measured REPORT THREADS MODULE [ARGUMENTS]

Runs a program as it is and writes what its training cost. Everybody here trains with transformers' Trainer, so what is
measured begins and ends for all at the same two places: reading records and loading weights is not in it, optimizer,
logging and checkpoints are.
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


@contextmanager
def measuring(report: Path, stalls: list[float]) -> Iterator[None]:
    """Write processor-seconds, seconds, share of them in which a checkpoint stopped training, and peak memory in MB."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    cpu, began = time.process_time(), time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    gpu = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else 0.0
    found = {
        "cpu": time.process_time() - cpu,
        "seconds": seconds,
        "stall": sum(stalls) / seconds,
        "memory": gpu or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }
    report.write_text(json.dumps(found))


def measure_trainers(report: Path) -> None:
    """From now on a Trainer's `train` is measured, and each of its checkpoints."""
    from transformers import Trainer

    train = Trainer.train

    def measured(self: Any, *arguments: Any, **named: Any) -> Any:
        stalls: list[float] = []
        save = self._save_checkpoint

        def timed(*given: Any, **options: Any) -> None:
            began = time.perf_counter()
            save(*given, **options)
            stalls.append(time.perf_counter() - began)

        self._save_checkpoint = timed
        with measuring(report, stalls):
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
