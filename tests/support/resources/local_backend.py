"""Jobs of the local backend, with a program that the test controls."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import Job, Program, StoreAddress
from resources.compute.base import Follower, Observation
from resources.compute.local.work_folder import work_folder
from resources.stack.detached_process import PID_FILE

ROOT = Path(__file__).resolve().parents[3]

BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}

PROGRAM = """
import os, signal, sys, time
from recipes.runner import Preempted, Restart, log_line, main
from recipes.contracts.job import BadConfiguration, Result

def program(job, store, work):
    with (work / "starts").open("a") as starts:
        starts.write("start\\n")
    log_line("begun")
    do = job.parameters["do"]
    if do == "bad":
        raise BadConfiguration("no such thing: correct it")
    if do == "fault":
        raise ValueError("a fault")
    if do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "die four times" and (work / "starts").read_text().count("start") < 5:
        os.utime(work / "attempt.json", (0, 0))  # as if it had got on for an hour before
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "save and die four times" and (count := (work / "starts").read_text().count("start")) < 5:
        saved = work / "checkpoints" / "from-3" / str(count)
        saved.mkdir(parents=True)
        (saved / "manifest.json").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "save once and die":
        saved = work / "checkpoints" / "1"
        half = work / "checkpoints" / ".2.tmp"
        if not saved.exists():
            saved.mkdir(parents=True)
            half.mkdir()
            (saved / "manifest.json").touch()
        (half / "manifest.json").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "preempted once" and (work / "starts").read_text().count("start") == 1:
        raise Preempted("checkpoint 1 holds everything")
    if do == "preempted often" and (work / "starts").read_text().count("start") < 6:
        raise Preempted("checkpoint 1 holds everything")
    if do == "restart once" and (work / "starts").read_text().count("start") == 1:
        raise Restart("on with half the batch")
    if do == "term":
        def leave(number, frame):
            raise Preempted("asked to stop")
        signal.signal(signal.SIGTERM, leave)
    while do in ("wait", "term") and not (work / "go").exists():
        time.sleep(0.01)
    log_line("finishing")
    return Result(work_digest=job.work_digest, metrics={"starts": float((work / "starts").read_text().count("start"))})

main(program)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a checkout whose program `prepare` is PROGRAM; the rest of `recipes` is real."""
    package = tmp_path_factory.mktemp("source") / "recipes"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__.append({str(ROOT / 'recipes')!r})\n")
    (package / "prepare.py").write_text(PROGRAM)
    return package.parent


@pytest.fixture
def job_that(tmp_path: Path) -> Callable[..., Job]:
    def make(do: str, **changed: Any) -> Job:
        job = Job(
            id="job-1",
            program=Program.PREPARE,
            parameters={"do": do},
            result_uri="s3://hanzo-ml/runs/job-1/result.json",
            store=StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS),
            cache_dir=str(tmp_path / "cache"),
        ).model_copy(update=changed)
        return job.model_copy(update={"work_dir": str(work_folder(tmp_path / "jobs", job))})

    return make


class Watcher:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.phases: list[Observation] = []
        self.follower = Follower(self.lines.append, self.phases.append)


def until(what: str, look: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.01)


def starts(job: Job) -> int:
    path = Path(job.work_dir) / "starts"
    return path.read_text().count("start") if path.is_file() else 0


def let_finish(job: Job) -> None:
    (Path(job.work_dir) / "go").touch()


def kill(job: Job) -> None:
    os.kill(json.loads((Path(job.work_dir) / PID_FILE).read_text()), signal.SIGKILL)
