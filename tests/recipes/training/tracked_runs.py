"""Training processes started by LocalCompute, which log to a real tracking server."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.contracts.job import Job, Result, Tracking
from recipes.contracts.recipe_references import OBJECTIVES_GROUP
from recipes.contracts.results import TrainingFacts
from resources.compute.base import Follower
from resources.compute.local.backend import LocalCompute
from tests.recipes.training.training_workspace import Place
from tests.support.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[3]
LONG = 240.0


class Runs:
    """Starts training runs with LocalCompute and a real server; a reused name resumes its run."""

    def __init__(self, place: Place, server: ServerProcess, folder: Path) -> None:
        self.place = place
        self.server = server
        self.folder = folder
        self.compute = LocalCompute(folder, source=ROOT, poll_seconds=0.02)
        self._run_ids: dict[str, str] = {}

    def run_id(self, name: str) -> str:
        if name not in self._run_ids:
            answer = httpx.post(f"{self.server.url}/api/2.0/mlflow/runs/create", json={"experiment_id": "0"})
            self._run_ids[name] = answer.json()["run"]["info"]["run_id"]
        return self._run_ids[name]

    def job(self, name: str, **changed: Any) -> Job:
        job = self.place.job(self.folder / name, changed)
        recipe = self.place.recipe.changed(changed)
        tracking = Tracking(uri=self.server.url, run_id=self.run_id(name))
        work = str(self.compute.folder(job))
        return job.model_copy(update={"work_dir": work, "tracking": tracking, "distributed": recipe.distributed})

    def train(self, job: Job, on_line: Callable[[str], None] = lambda line: None) -> Result:
        lines: list[str] = []

        def line(text: str) -> None:
            lines.append(text)
            on_line(text)

        try:
            return self.compute.run(job, Follower(line=line, phase=lambda observation: None))
        except Exception as error:
            raise AssertionError("\n".join(lines)) from error

    def losses(self, name: str, key: str = "train/loss") -> list[tuple[int, float]]:
        """Return the metric history that the server has."""
        query = {"run_id": self.run_id(name), "metric_key": key}
        answer = httpx.get(f"{self.server.url}/api/2.0/mlflow/metrics/get-history", params=query).json()
        return [(point["step"], point["value"]) for point in answer["metrics"]]


def losses_of(result: Result) -> dict[int, float]:
    return {step: loss or 0.0 for step, loss in TrainingFacts.model_validate(result.facts).losses.items()}


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def step_of(line: str) -> int:
    """Return the step of a progress line, or 0 for any other line."""
    found = re.search(r" step (\d+)/\d+ loss ", line)
    return int(found[1]) if found else 0


def steps_broken_off(said: str) -> int:
    """Count the steps that a log reports as aborted.

    Aborted evaluations do not count: they consume no row.
    """
    return len(re.findall(r" step \d+ aborted", said))


def wait_for_step(compute: LocalCompute, job: Job, step: int, offset: int) -> int:
    """Wait until the log past `offset` reports that step; return the new offset."""
    return wait_for_line(compute, job, lambda line: step_of(line) >= step, offset)


def wait_for_line(compute: LocalCompute, job: Job, awaited: Callable[[str], bool], offset: int = 0) -> int:
    end = time.monotonic() + LONG
    seen = [""]
    while not any(map(awaited, seen)):
        assert time.monotonic() < end, seen
        text, offset = compute.read_lines(job, offset)
        seen += text.splitlines()
        time.sleep(0.02)
    return offset


def install(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch, group: str = OBJECTIVES_GROUP) -> None:
    """Install the class of that name in a module's source as an objective."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:{name.capitalize()}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
