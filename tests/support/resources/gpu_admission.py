"""A machine with some GPUs, and jobs that wait for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import Hardware, Job, Program, StoreAddress
from resources.compute.base import Phase
from resources.compute.local.backend import LocalCompute
from resources.compute.local.gpu_meter import Meter
from resources.compute.local.leases import Leases
from resources.compute.local.work_folder import work_folder
from tests.support.resources.local_backend import BUCKETS, ROOT, let_finish, until

PROGRAM = """
import os, time
from recipes.runner import main, log_line
from recipes.contracts.job import Result

def program(job, store, work):
    log_line("on " + os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    while not (work / "go").exists():
        time.sleep(0.01)
    return Result(work_digest=job.work_digest)

main(program)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a checkout whose programs are PROGRAM; the rest of `recipes` is real."""
    package = tmp_path_factory.mktemp("source") / "recipes"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__.append({str(ROOT / 'recipes')!r})\n")
    for program in ("train", "evaluate", "command", "convert"):
        (package / f"{program}.py").write_text(PROGRAM)
    return package.parent


class GpuMachine:
    """A machine with some GPUs, and jobs on it.

    Each supervisor is a new one without state in memory.
    """

    meter: Meter | None = None

    def __init__(self, folder: Path, source: Path, names: tuple[str, ...] | None, places: int | None = None) -> None:
        self.folder, self.source = folder, source
        self.leases = Leases(folder / "gpus", names, places)
        self.jobs: list[Job] = []

    @property
    def compute(self) -> LocalCompute:
        return LocalCompute(
            self.folder / "jobs",
            source=self.source,
            grace_seconds=20,
            poll_seconds=0.02,
            leases=lambda: self.leases,
            meter=self.meter,
        )

    def job(self, name: str, gpus: int = 1, **changed: Any) -> Job:
        job = Job(
            id=name,
            program=Program.TRAIN,
            result_uri=f"s3://hanzo-ml/runs/{name}/result.json",
            store=StoreAddress(root=(self.folder / "objects").as_uri(), buckets=BUCKETS),
            cache_dir=str(self.folder / "cache"),
            hardware=Hardware(gpus=gpus),
        ).model_copy(update=changed)
        job = job.model_copy(update={"work_dir": str(work_folder(self.folder / "jobs", job))})
        self.jobs.append(job)
        return job

    def submitted(self, name: str, gpus: int = 1, **changed: Any) -> Job:
        job = self.job(name, gpus, **changed)
        self.compute.submit(job)
        return job

    def phase(self, job: Job) -> Phase:
        return self.compute.observe(job).phase

    def on(self, job: Job) -> str:
        """Return the GPUs that each program of the job reported."""
        until("its first line", lambda: " on " in self.compute.read_lines(job, 0)[0])
        lines = self.compute.read_lines(job, 0)[0].splitlines()
        return " ".join(line.split(" on ")[1] for line in lines if " on " in line)

    def end(self, job: Job) -> None:
        let_finish(job)
        until("its end", lambda: self.phase(job) is Phase.SUCCEEDED)


@contextmanager
def gpu_machine(
    folder: Path, source: Path, *names: str, known: bool = True, places: int | None = None
) -> Iterator[GpuMachine]:
    there = GpuMachine(folder, source, names if known else None, places)
    try:
        yield there
    finally:
        for job in there.jobs:
            there.compute.cancel(job)
