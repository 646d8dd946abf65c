"""A command on two nodes publishes one state: both parts, from the same moment."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.command.multi_node_publisher import NodesOutOfStep, StoreUnavailable
from recipes.command.nodes import FILES_COPIED, NodeGroup, restore_part
from recipes.command.snapshot_store import SnapshotStore
from recipes.contracts.job import Job, Result
from recipes.storage.buckets import StoreFull
from tests.support.recipes.command_gang import NODES, Node, Pods, gang, one_state, together
from tests.support.recipes.command_program import CommandJobs, commands, until
from tests.support.recipes.observed_store import PLACE, Small, Watched

__all__ = ["commands"]  # a fixture


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.command.nodes.POLL_SECONDS", 0.01)
    monkeypatch.setattr("recipes.command.multi_node_publisher.POLL_SECONDS", 0.01)


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "objects")


def brought(store: Watched, folder: Path) -> list[dict[str, str]]:
    """Return the files that new machines start with, by rank."""
    state = SnapshotStore(store, PLACE, keep_last=2).newest()
    found = []
    for rank in range(NODES):
        target = folder / f"new-{rank}"
        shutil.rmtree(target, ignore_errors=True)
        if state:
            restore_part(store, state, rank, folder / "cache", target)
        found.append({path.name: path.read_text() for path in target.iterdir()} if state else {})
    return found


def test_nodes_restore_their_own_files_and_the_shared_ones(store: Watched, tmp_path: Path) -> None:
    first, second = nodes = gang(store, tmp_path)
    first.write(common="1", shard="0 of 1")
    second.write(shard="1 of 1")
    one_state(nodes)
    expected = [{"common": "1", "shard": "0 of 1"}, {"common": "1", "shard": "1 of 1"}]
    assert brought(store, tmp_path) == expected
    state = first.states.newest()
    assert state and [file.path for file in store.manifest(state).files] == [".nodes/1/shard", "common", "shard"]
    store.sent.clear()
    one_state(nodes)
    assert store.sent == [], "nothing has changed on any"


def test_parts_of_different_steps_are_not_published(store: Watched, tmp_path: Path) -> None:
    """The second node writes its next step after the first has copied the previous one."""
    first, second = nodes = gang(store, tmp_path)
    first.write(shard="0 of 1")
    second.write(shard="1 of 1")
    one_state(nodes)
    first.write(shard="0 of 2")
    second.write(shard="1 of 2")
    wait_for = second.saving._wait_for

    def meanwhile(word: str, count: int | None = None) -> dict[str, set[int]]:
        said = wait_for(word, count)
        if word == FILES_COPIED:
            second.write(shard="1 of 3")
        return said

    second.saving._wait_for = meanwhile  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        one_state(nodes)
    assert [type(node.problem).__name__ for node in nodes] == ["NodesOutOfStep", "FilesChanged"]
    assert brought(store, tmp_path) == [{"shard": "0 of 1"}, {"shard": "1 of 1"}]
    for node in nodes:
        node.problem = None
    second.saving._wait_for = wait_for  # type: ignore[method-assign]
    first.write(shard="0 of 3")
    one_state(nodes)
    assert brought(store, tmp_path) == [{"shard": "0 of 3"}, {"shard": "1 of 3"}]


def test_single_part_is_not_published(store: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine dies as the command ends on the other."""
    monkeypatch.setattr("recipes.command.multi_node_publisher.FINAL_TIMEOUT_SECONDS", 0.05)
    first, second = nodes = gang(store, tmp_path)
    first.write(shard="0 of 1")
    second.write(shard="1 of 1")
    one_state(nodes)
    first.write(shard="0 of 2")
    first.saving.end(lambda: True)
    with pytest.raises(NodesOutOfStep, match="other nodes did not end"):
        first.saving.publish()
    second.saving.end(lambda: True)
    assert brought(store, tmp_path) == [{"shard": "0 of 1"}, {"shard": "1 of 1"}]


def test_final_state_waits_for_the_slowest_node(store: Watched, tmp_path: Path) -> None:
    first, second = nodes = gang(store, tmp_path)
    first.write(shard="0")
    second.write(shard="1")

    def leave(node: Node) -> None:
        if node is first:
            time.sleep(0.2)
        node.saving.end()
        node.saving.publish()

    together(nodes, leave)
    assert brought(store, tmp_path) == [{"shard": "0"}, {"shard": "1"}]


def test_state_is_published_only_once_all_parts_found_space(tmp_path: Path) -> None:
    large, small = Watched(tmp_path / "objects"), Small(tmp_path / "objects", 0)
    first, second = Node(large, tmp_path, 0), Node(small, tmp_path, 1)
    nodes = [first, second]
    together(nodes, lambda node: node.nodes.rendezvous(lambda: None))
    first.write(shard="0")
    second.write(shard="1")

    def leave(node: Node) -> None:
        node.saving.end()
        while True:
            try:
                node.saving.publish()
                return
            except (StoreFull, StoreUnavailable):
                assert node.states.newest() is None
                small.room = 1 << 20

    together(nodes, leave)
    assert brought(large, tmp_path) == [{"shard": "0"}, {"shard": "1"}]


def test_rendezvous_ignores_answers_of_an_earlier_start(store: Watched, tmp_path: Path) -> None:
    """The first node restarted and the second has not yet: the rendezvous waits for it."""
    gang(store, tmp_path)
    first, second = NodeGroup(store, PLACE, 0, NODES), NodeGroup(store, PLACE, 1, NODES)
    met: list[str | None] = []
    threads = [threading.Thread(target=lambda: met.append(second.rendezvous(lambda: None)), daemon=True)]
    threads[0].start()
    until("an answer to the earlier call", lambda: len([u for u in store.list(PLACE) if u.endswith("/node-1")]) == 1)
    assert met == [], "that start began without it"
    threads.append(
        threading.Thread(target=lambda: met.append(first.rendezvous(lambda: "where all go on from")), daemon=True)
    )
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert met == ["where all go on from"] * 2


SHARDS = """
import os, pathlib, time
rank, kept = os.environ["PET_NODE_RANK"], pathlib.Path(os.environ["HANZO_ML_CHECKPOINTS"])
found = {path.name: path.read_text() for path in sorted(kept.iterdir())}
print("found", found, flush=True)
name = "shard-" + rank
(kept / "tmp").write_text(rank)
(kept / "tmp").rename(kept / name)
if rank == "0": (kept / "common").write_text("for all")
if not found: time.sleep(600)
"""


@pytest.fixture
def job(commands: CommandJobs) -> Iterator[Job]:
    shape = {"num_nodes": NODES, "gpus_per_node": 1, "backend": "gloo"}
    yield commands.job(SHARDS, distributed=shape, schedule={"checkpoint_interval": "0.2s"})


@pytest.mark.slow
def test_command_resumes_with_shards_of_two_dead_machines(commands: CommandJobs, job: Job, tmp_path: Path) -> None:
    """Regression: only the first machine's shards were published, losing half of a sharded model."""
    pods = Pods(job, tmp_path / "first")
    until("a state of both", lambda: (state := commands.state()) and len(commands.store.manifest(state).files) == 3)
    pods.kill()
    again = Pods(job, tmp_path / "second")
    codes = [process.wait(60) for process in again.processes]
    assert codes == [0, 0], [log.read_text() for log in again.logs]
    assert again.found() == [
        "found {'common': 'for all', 'shard-0': '0', 'shard-1': '1'}",
        "found {'common': 'for all', 'shard-0': '0', 'shard-1': '1'}",
    ]
    made = Result.model_validate_json(commands.store.get_bytes(job.result_uri)).artifacts["checkpoints"]
    paths = [file.path for file in commands.store.manifest(made).files]
    assert paths == [".nodes/1/shard-1", "common", "shard-0"], "what others have is no part of a node's own"
