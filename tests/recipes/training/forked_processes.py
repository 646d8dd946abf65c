"""Training processes forked from one that has loaded the libraries.

They start training within one second instead of ten.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import pytest

from recipes import train as program
from recipes.contracts.job import EXIT_PREEMPTED, Job, Result
from recipes.runner import main
from resources.compute.base import PROGRAM_ENVIRONMENT
from resources.compute.local.command import MULTI_PROCESS_ENVIRONMENT
from tests.recipes.training.tracked_runs import LONG, step_of
from tests.recipes.training.training_workspace import NOBODY, Place
from tests.support.free_ports import free_port

LOADED = [
    __name__,
    "deepspeed",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
]
"""Modules to preload. None may start threads, which a fork does not inherit."""


class Forks:
    """Trains each job in new processes until they end or are killed."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(LOADED)

    def train(self, job: Job) -> Result:
        """Train the job, or return its result if it already has one."""
        if self.place.store.exists(job.result_uri):
            return Result.model_validate_json(self.place.store.get_bytes(job.result_uri))
        processes = self._start(job)
        for process in processes:
            process.join(LONG)
        assert [process.exitcode for process in processes] == [0] * len(processes), log_of(job).read_text()
        return Result.model_validate_json(self.place.store.get_bytes(job.result_uri))

    def kill(self, job: Job, step: int, chance: Random) -> None:
        """Train until that step and any checkpoint are done, then kill all processes.

        The delay before the kill is random, up to the duration of a step, and so is the order. On a fast machine
        any fixed delay would outlast the rest of the run.
        """
        before = log_of(job).stat().st_size if log_of(job).exists() else 0
        processes = self._start(job)
        time.sleep(chance.uniform(0, wait_for_step(job, step, before, processes)))
        for process in chance.sample(processes, len(processes)):
            process.kill()
            process.join()
            assert process.exitcode, "it was over before it was killed"

    def stop(self, job: Job, step: int) -> None:
        """Train at least until that step, then send SIGTERM to all processes, like the supervisor."""
        before = log_of(job).stat().st_size if log_of(job).exists() else 0
        processes = self._start(job)
        wait_for_step(job, step, before, processes, saved=False)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(LONG)
        codes = [process.exitcode for process in processes]
        assert codes[0] == EXIT_PREEMPTED and None not in codes, (codes, log_of(job).read_text())

    def _start(self, job: Job) -> Sequence[BaseProcess]:
        Path(job.work_dir).mkdir(parents=True, exist_ok=True)
        size = job.distributed.gpus_per_node if job.distributed else 1
        port = free_port()
        processes = [
            self._context.Process(target=begin, args=(job.model_dump_json(), rank, size, port)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        return processes


@contextmanager
def forks(place: Place) -> Iterator[Forks]:
    """Yield a Forks whose processes have the environment that LocalCompute sets."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (PROGRAM_ENVIRONMENT | MULTI_PROCESS_ENVIRONMENT).items():
            patched.setenv(name, value)
        yield Forks(place)


def begin(described: str, rank: int, size: int, port: int) -> None:
    """Run the program in a new process, with the variables that torchrun sets."""
    gc.freeze()  # a garbage collection writes to shared pages: copying them took a second
    job = Job.model_validate_json(described)
    with log_of(job).open("ab", buffering=0) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    if job.distributed:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": job.id}
    if job.tracking and job.tracking.uri == NOBODY:
        program.METRICS_GRACE_SECONDS = 0
    file = Path(job.work_dir, f"job-{rank}.json")
    file.write_text(described)
    sys.argv = ["train", str(file)]
    main(program.train)


def log_of(job: Job) -> Path:
    return Path(job.work_dir, "log.txt")


def wait_for_step(job: Job, step: int, offset: int, processes: Sequence[BaseProcess], *, saved: bool = True) -> float:
    """Wait until the step is done and, if `saved`, a checkpoint is committed.

    Commits run in the background while training continues. Return the approximate seconds per step.
    """
    end = time.monotonic() + LONG
    seen: dict[int, float] = {}
    while True:
        text = log_of(job).read_bytes()[offset:].decode() if log_of(job).exists() else ""
        now = time.monotonic()
        for line in text.splitlines(keepends=True):
            if line.endswith("\n") and (done := step_of(line)):
                seen.setdefault(done, now)
        if max(seen, default=0) >= step and (" saved" in text or not saved):
            return (max(seen.values()) - min(seen.values())) / len(seen)
        assert now < end and all(process.is_alive() for process in processes), text
        time.sleep(0.002)
