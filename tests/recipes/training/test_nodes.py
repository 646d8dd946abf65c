"""Training on two nodes, started as pods are: they share a store and a network, and no folder (rows H1, H2, H8, I3)."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.results import TrainingFacts
from recipes.schema import Job, Result, Tracking
from resources.compute.kubernetes.gang import gang_of
from resources.compute.kubernetes.torchrun import JOB_FILE, RENDEZVOUS_PORT, command
from resources.settings_sections import Scheduler
from tests.api.server_process import ServerProcess, free_port
from tests.recipes.training.forks import Forks
from tests.recipes.training.place import Place

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
LONG = 240.0
NODES = 2
STEPS = 40
FULL = {"method": "full", "dtype": "float32", "learning_rate": 1e-3}


class Gang:
    """The pods of a job, each with a folder of its own that is as empty as a new pod's."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._folder = folder
        port = free_port()
        self.nodes = [self._start(job, rank, port) for rank in range(NODES)]

    def _start(self, job: Job, rank: int, port: int) -> subprocess.Popen[bytes]:
        folder = self._folder / str(rank)
        (folder / "work").mkdir(parents=True)
        mine = job.model_copy(update={"work_dir": str(folder / "work"), "cache_dir": str(folder / "cache")})
        (folder / "job.json").write_text(mine.model_dump_json())
        pod = {
            "python": sys.executable,
            JOB_FILE: str(folder / "job.json"),
            "--node-rank=$(NODE_RANK)": f"--node-rank={rank}",
            f"--master-port={RENDEZVOUS_PORT}": f"--master-port={port}",
        }
        words = [pod.get(word, word) for word in command(gang_of(job, Scheduler()), "127.0.0.1")]
        with self.log(rank).open("wb") as log:
            return subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True, env=environment())

    def log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def step(self) -> int:
        """The last one that a node has told of."""
        told = [re.findall(r" step (\d+)/\d+ loss ", self.log(rank).read_text()) for rank in range(NODES)]
        return max((int(number) for numbers in told for number in numbers), default=0)

    def until(self, step: int) -> None:
        end = time.monotonic() + LONG
        while self.step() < step:
            assert time.monotonic() < end and any(node.poll() is None for node in self.nodes), self.said()
            time.sleep(0.02)

    def wait(self) -> list[int]:
        try:
            return [node.wait(LONG) for node in self.nodes]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said()) from None

    def said(self) -> str:
        return "\n".join(f"--- node {rank}\n{self.log(rank).read_text()[-3000:]}" for rank in range(NODES))

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            for pid in session(self.nodes[rank].pid):
                os.kill(pid, signal.SIGKILL)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def session(leader: int) -> list[int]:
    """A launcher and all below it, whose processes have sessions of their own."""
    found = [leader]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def job_of(place: Place, server: ServerProcess, folder: Path, nodes: int, strategy: str, **changed: Any) -> Job:
    shape = {"strategy": strategy, "num_nodes": nodes, "gpus_per_node": NODES // nodes, "backend": "gloo"}
    settings = {"batch_size": 2, "max_steps": STEPS, "distributed": shape, **changed}
    made = httpx.post(f"{server.url}/api/2.0/mlflow/runs/create", json={"experiment_id": "0"}).json()
    tracking = Tracking(uri=server.url, run_id=made["run"]["info"]["run_id"])
    distributed = place.recipe.changed(settings).distributed
    return place.job(folder, settings).model_copy(update={"distributed": distributed, "tracking": tracking})


def result_of(place: Place, job: Job) -> Result:
    return Result.model_validate_json(place.store.get_bytes(job.result_uri))


def losses_of(result: Result) -> dict[int, float | None]:
    return TrainingFacts.model_validate(result.facts).losses


@pytest.mark.parametrize(("strategy", "method"), [("ddp", {}), ("fsdp", FULL), ("deepspeed_zero3", FULL)])
def test_a_lost_node_and_a_preemption_change_nothing(
    place: Place, server: ServerProcess, started: Forks, tmp_path: Path, strategy: str, method: dict[str, Any]
) -> None:
    """To the last bit what as many processes compute on one node, undisturbed."""
    whole = started.train(job_of(place, server, tmp_path / f"node-{strategy}", 1, strategy, **method))
    job = job_of(place, server, tmp_path / f"nodes-{strategy}-lost", NODES, strategy, **method)
    gang = Gang(job, tmp_path / "lost")
    gang.until(4)
    gang.kill(1)
    codes = gang.wait()
    assert codes[0] not in (0, 78), gang.said()

    gang = Gang(job, tmp_path / "preempted")
    gang.until(16)
    for node in gang.nodes:
        node.send_signal(signal.SIGTERM)
    assert gang.wait() == [143, 143], gang.said()

    gang = Gang(job, tmp_path / "last")
    assert gang.wait() == [0, 0], gang.said()
    result = result_of(place, job)
    assert 16 <= (TrainingFacts.model_validate(result.facts).resumed_from or 0) < STEPS
    assert losses_of(result) == losses_of(whole)
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }
