"""Several nodes that run one command and publish its folder."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.command.multi_node_publisher import MultiNodePublisher
from recipes.command.nodes import NodeGroup
from recipes.command.snapshot_store import SnapshotStore
from recipes.contracts.job import Job
from recipes.storage.manifest import Manifest
from tests.support.recipes.command_program import ROOT
from tests.support.recipes.observed_store import PLACE, Watched

NODES = 2


class Node:
    """One node of a command, with its own folder; all nodes scan simultaneously."""

    def __init__(self, store: Watched, folder: Path, rank: int, interval: float = 0.0) -> None:
        self.folder = folder / str(rank) / "checkpoints"
        self.folder.mkdir(parents=True)
        self.nodes = NodeGroup(store, PLACE, rank, NODES)
        states = SnapshotStore(store, PLACE, keep_last=2)
        made_of = Manifest(kind="checkpoints", files=())
        self.saving = MultiNodePublisher(self.folder, states, made_of, interval, lambda: None, self.nodes, {})
        self.states = states
        self.problem: BaseException | None = None

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / f"{name}.tmp").write_text(text)
            (self.folder / f"{name}.tmp").rename(self.folder / name)

    def run(self, work: Callable[[], Any]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self.problem = error

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread


def gang(store: Watched, folder: Path) -> list[Node]:
    nodes = [Node(store, folder, rank) for rank in range(NODES)]
    together(nodes, lambda node: node.nodes.rendezvous(lambda: None))
    return nodes


def together(nodes: list[Node], work: Callable[[Node], Any]) -> None:
    """Run the work on all nodes at the same time and assert that none raises."""
    threads = [node.run(lambda node=node: work(node)) for node in nodes]
    for thread in threads:
        thread.join(60)
    assert [node.problem for node in nodes] == [None] * len(nodes)
    assert not any(thread.is_alive() for thread in threads)


def one_state(nodes: list[Node]) -> None:
    """Complete one snapshot: the first node requests it, the others scan until done."""

    def look(node: Node) -> None:
        asked = node.saving._current_request
        while node.saving._current_request == asked:
            node.saving.scan_once()

    together(nodes, look)


class Pods:
    """Run the program on each node with an empty folder, like a new pod."""

    def __init__(self, job: Job, folder: Path, **variables: str) -> None:
        self.logs = [folder / f"{rank}.log" for rank in range(NODES)]
        self._variables = variables
        self.processes = [self._start(job, folder / str(rank), rank) for rank in range(NODES)]

    def _start(self, job: Job, folder: Path, rank: int) -> subprocess.Popen[bytes]:
        folder.mkdir(parents=True)
        mine = job.model_copy(update={"work_dir": str(folder / "work"), "cache_dir": str(folder / "cache")})
        (folder / "job.json").write_text(mine.model_dump_json())
        words = [sys.executable, "-m", "recipes.command", str(folder / "job.json")]
        env = {**os.environ, **self._variables, "PET_NODE_RANK": str(rank), "PYTHONPATH": str(ROOT)}
        with self.logs[rank].open("wb") as log:
            return subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, env=env)

    def kill(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait(60)

    def found(self) -> list[str]:
        return [line for line in self.lines() if line.startswith("found")]

    def lines(self) -> list[str]:
        return [line for log in self.logs for line in log.read_text().splitlines()]
