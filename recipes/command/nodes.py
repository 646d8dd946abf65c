"""Coordinate a command's nodes through the store; assign each its snapshot part."""

import json
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from recipes.command.snapshot_copy import FileStamp, stat_file
from recipes.runner import Restart
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, FileRecord, Manifest

# What of a state is which node's, of a command that runs on several: the first's files lie where they lay in its folder,
# so that they are found as those of a single one are, and those of node 1 below `.nodes/1`: deeper than any like them.

NODES_FACT = "nodes"
"""The fact of a state that says how many nodes have a part in it. One that was made before there were parts says none."""
NODES_FOLDER = ".nodes"


def node_prefix(rank: int) -> str:
    return f"{NODES_FOLDER}/{rank}/" if rank else ""


def is_reserved(path: str) -> bool:
    """Whether a file of the first node's own lies where another node's part does."""
    return path.startswith(f"{NODES_FOLDER}/")


def merge_parts(parts: Sequence[Manifest], template: Manifest) -> Manifest:
    """The state that these are the parts of, by rank."""
    files = [
        file.model_copy(update={"path": f"{node_prefix(rank)}{file.path}"})
        for rank, part in enumerate(parts)
        for file in part.files
    ]
    ordered = tuple(sorted(files, key=lambda file: PurePosixPath(file.path)))
    return template.model_copy(update={"files": ordered, "facts": {**template.facts, NODES_FACT: len(parts)}})


def find_owner(path: str, snapshot: Manifest) -> tuple[int, str]:
    """Whose a file of a state is, and where it lay there."""
    if NODES_FACT not in snapshot.facts or not is_reserved(path):
        return 0, path
    _, rank, own = path.split("/", 2)
    return int(rank), own


def files_for_node(rank: int, snapshot: Manifest) -> dict[str, tuple[int, FileRecord]]:
    """What a node begins with, by the path in its folder: whose it is, and the file.

    Its own, and what others have at paths that it has not, the first before all: as if they had shared a folder. A script
    whose first process saves for all looks for that on each node; and of a tensor that all have alike
    `torch.distributed.checkpoint` writes one copy, into any process's file, where each process looks for it.
    """
    files = [(*find_owner(file.path, snapshot), file) for file in snapshot.files]
    found: dict[str, tuple[int, FileRecord]] = {}
    folders: set[str] = set()
    for owner, path, file in sorted(files, key=lambda each: (each[0] != rank, each[0])):
        ancestors = {parent.as_posix() for parent in PurePosixPath(path).parents}
        if path not in found and path not in folders and not ancestors & found.keys():
            found[path] = owner, file
            folders |= ancestors
    return found


def restore_part(store: Store, state: Artifact, rank: int, cache: Path, target: Path) -> Mapping[str, FileStamp]:
    """Make `target` what a node begins with; return what of it is others', and no part of this node's own state.

    Raises:
        BrokenArtifact: a file of it is missing, or is not the one that was published.
    """
    wanted = files_for_node(rank, store.manifest(state))
    fetched = store.fetch(state, cache, only=[file.path for _, file in wanted.values()])
    scratch = target.with_name(f".{target.name}.tmp")  # so that a kill leaves no half of it for the command
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for path, (_, file) in wanted.items():
        (scratch / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(fetched / file.path, scratch / path)
    shutil.rmtree(target, ignore_errors=True)
    scratch.replace(target)
    borrowed = (path for path, (owner, _) in wanted.items() if owner != rank)
    return {path: stamp for path in borrowed if (stamp := stat_file(target / path))}


# The nodes that run a command together, and what they tell each other through the store, which is all that they share.
#
# They meet anew whenever they start. Then the first asks for a state, and all say how far they are with it. Nobody's
# clock counts: each takes the files of its folder, and looks again when all have taken theirs. If none has changed by
# then, all folders were as they were taken at one moment: that at which the last was. Files of two steps never make one
# state.

RENDEZVOUS_TIMEOUT_SECONDS = 900.0
"""How long the others are waited for at the start, as torchrun waits for them."""
POLL_SECONDS = 1.0
FILES_COPIED, FILES_UNCHANGED, COPY_CONSISTENT, PART_STORED, SNAPSHOT_COMPLETE, SNAPSHOT_FAILED = (
    "taken",
    "same",
    "still",
    "part",
    "made",
    "not",
)
"""What a node says of a state: that it has its files, that they are those of the state before, that they are as they were
when all had theirs, that its part is in the store, that the state is whole; or that there will be none.
"""


@dataclass(frozen=True)
class SnapshotRequest:
    """A state that the first node asks for; `last` is that of commands that have ended."""

    name: str
    last: bool


class NodeGroup:
    """One node's view of all.

    Args:
        place: the logical URI below which the states of the job lie.
        rank: 0 is the first, which leads.
    """

    def __init__(self, store: Store, location: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store, self._uri = store, f"{location}/nodes"
        self._rendezvous_id = ""
        self._current_request: SnapshotRequest | None = None

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def rendezvous(self, newest: Callable[[], str | None]) -> str | None:
        """Wait for the others; return where the state lies that all go on from, which is the first one's `newest`.

        An answer to a call of an earlier start, or of a node that has been replaced since, is no answer to this one.

        Raises:
            Restart: not all have come.
        """
        own_id, until = uuid.uuid4().hex, time.monotonic() + RENDEZVOUS_TIMEOUT_SECONDS
        if self.is_leader:
            self._write("call", own_id)
        while time.monotonic() < until:
            if self.is_leader and (state := self._start(own_id, newest)) is not None:
                return state["uri"]
            if not self.is_leader and (state := self._join(own_id)) is not None:
                return state["uri"]
            time.sleep(POLL_SECONDS)
        raise Restart(f"of {self.size} nodes not all have come within {RENDEZVOUS_TIMEOUT_SECONDS:g} s")

    def _start(self, rendezvous_id: str, newest: Callable[[], str | None]) -> dict[str, str | None] | None:
        """Of the first: the state, once all the others have answered."""
        answers = {str(rank): self._read(f"{rendezvous_id}/node-{rank}") for rank in range(1, self.size)}
        if None in answers.values():
            return None
        for uri in self._store.list(self._uri):  # of those who met before
            if not uri.startswith((f"{self._uri}/{rendezvous_id}/", f"{self._uri}/call")):
                self._store.delete(uri)
        state = {"uri": newest()}
        self._write(f"{rendezvous_id}/begin", json.dumps({"nodes": answers, "state": state}))
        self._rendezvous_id = rendezvous_id
        return state

    def _join(self, own_id: str) -> dict[str, str | None] | None:
        """Of the others: the state, once the first has heard this one's answer."""
        rendezvous_id = self._read("call")
        if rendezvous_id is None:
            return None
        begin = json.loads(self._read(f"{rendezvous_id}/begin") or '{"nodes": {}}')
        if begin["nodes"].get(str(self.rank)) == own_id:
            self._rendezvous_id = rendezvous_id
            state: dict[str, str | None] = begin["state"]
            return state
        if self._read(f"{rendezvous_id}/node-{self.rank}") != own_id:
            self._write(f"{rendezvous_id}/node-{self.rank}", own_id)
        return None

    def request_snapshot(self, name: str, *, last: bool) -> SnapshotRequest:
        """Of the first: for a state of this name. What was said of the one before is not needed any more."""
        if self._current_request:
            self._store.delete(f"{self._uri}/{self._rendezvous_id}/said/{self._current_request.name}")
        self._current_request = SnapshotRequest(name, last)
        self._write(f"{self._rendezvous_id}/asked", json.dumps({"name": name, "last": last}))
        return self._current_request

    def snapshot_request(self) -> SnapshotRequest | None:
        """What the first has asked for last."""
        text = self._read(f"{self._rendezvous_id}/asked")
        return SnapshotRequest(**json.loads(text)) if text else None

    def post_status(self, snapshot_request: SnapshotRequest, status: str, text: str = "") -> None:
        self._write(f"{self._rendezvous_id}/said/{snapshot_request.name}/{status}-{self.rank}", text)

    def read_statuses(self, snapshot_request: SnapshotRequest) -> dict[str, set[int]]:
        """Which nodes have said what."""
        found: dict[str, set[int]] = {}
        for uri in self._store.list(f"{self._uri}/{self._rendezvous_id}/said/{snapshot_request.name}"):
            status, _, rank = uri.rpartition("/")[2].partition("-")
            found.setdefault(status, set()).add(int(rank))
        return found

    def text(self, snapshot_request: SnapshotRequest, status: str, rank: int) -> str:
        return self._store.get_bytes(
            f"{self._uri}/{self._rendezvous_id}/said/{snapshot_request.name}/{status}-{rank}"
        ).decode()

    def _write(self, name: str, text: str) -> None:
        self._store.put_bytes(f"{self._uri}/{name}", text.encode())

    def _read(self, name: str) -> str | None:
        try:
            return self._store.get_bytes(f"{self._uri}/{name}").decode()
        except FileNotFoundError:
            return None
