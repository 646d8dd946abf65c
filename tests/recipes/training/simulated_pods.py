"""Pods of a training job, simulated as local processes.

As on a cluster, they share a store and a network, but no folder.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.contracts.job import Job
from recipes.launch.command import program_command
from recipes.launch.pod import Pod
from tests.support.free_ports import free_port

ROOT = Path(__file__).resolve().parents[3]
LONG = 240.0
NODES = 2


class Gang:
    """The pods of a job, each with its own variables and folder.

    A folder is empty like that of a new pod, or as an earlier gang left it.
    """

    def __init__(self, job: Job, folder: Path, variables: Sequence[dict[str, str]] = ({},) * NODES) -> None:
        self._folder = folder
        self._variables = variables
        port = free_port()
        self.nodes = [self._start(job, rank, port) for rank in range(NODES)]

    def _start(self, job: Job, rank: int, port: int) -> subprocess.Popen[bytes]:
        folder = self._folder / str(rank)
        (folder / "work").mkdir(parents=True, exist_ok=True)
        mine = job.model_copy(update={"work_dir": str(folder / "work"), "cache_dir": str(folder / "cache")})
        (folder / "job.json").write_text(mine.model_dump_json())
        place = Pod(
            node_rank=rank,
            uid=str(rank),
            name=f"pod-{rank}",
            node=f"node-{rank}",
            generation=1,
            first_host="127.0.0.1",
            num_nodes=NODES,
            processes=job.distributed.gpus_per_node if job.distributed else 0,
            api="http://127.0.0.1",
            token="token",
            rendezvous_port=port,
        )
        words = program_command(mine, place, folder / "job.json")
        with self.log(rank).open("wb") as log:
            variables = environment() | self._variables[rank]
            return subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True, env=variables)

    def log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def step(self) -> int:
        """Return the newest step in the logs of the nodes."""
        steps = [re.findall(r" step (\d+)/\d+ loss ", self.log(rank).read_text()) for rank in range(NODES)]
        return max((int(number) for numbers in steps for number in numbers), default=0)

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
    """Return the pids of a launcher and its descendants, which have their own sessions."""
    found = [leader]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found
