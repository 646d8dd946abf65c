"""Coordinate a command's nodes through the store; assign each its snapshot part."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from recipes.command.folder_scan import FileStamp, scan_folder
from recipes.command.snapshot_store import read_snapshot_times
from recipes.runner import Restart
from recipes.storage.artifact_store import Store
from recipes.storage.folder_tree import find_escaping_link, remove_tree, write_tree
from recipes.storage.manifest import Artifact, FileRecord, FolderRecord, LinkRecord, Manifest

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


Entry = FileRecord | FolderRecord | LinkRecord


def merge_parts(parts: Sequence[Manifest], template: Manifest) -> Manifest:
    """The state that these are the parts of, by rank."""
    files, folders, links = [], [], []
    for rank, part in enumerate(parts):
        prefix = node_prefix(rank)
        for file in part.files:
            moved = {"path": f"{prefix}{file.path}", **({"object": f"{prefix}{file.object}"} if file.object else {})}
            files.append(file.model_copy(update=moved))
        folders += [folder.model_copy(update={"path": f"{prefix}{folder.path}"}) for folder in part.folders]
        links += [link.model_copy(update={"path": f"{prefix}{link.path}"}) for link in part.links]

    def order(entry: Entry) -> PurePosixPath:
        return PurePosixPath(entry.path)

    return template.model_copy(
        update={
            "files": tuple(sorted(files, key=order)),
            "folders": tuple(sorted(folders, key=order)),
            "links": tuple(sorted(links, key=order)),
            "facts": {**template.facts, NODES_FACT: len(parts)},
        }
    )


def find_owner(path: str, snapshot: Manifest) -> tuple[int, str]:
    """Whose a file of a state is, and where it lay there."""
    if NODES_FACT not in snapshot.facts or not is_reserved(path):
        return 0, path
    _, rank, own = path.split("/", 2)
    return int(rank), own


def entries_for_node(rank: int, snapshot: Manifest) -> dict[str, tuple[int, Entry]]:
    """What a node begins with, by the path in its folder: whose it is, and the file, link or folder.

    Its own, and what others have at paths that it has not, the first before all: as if they had shared a folder. A script
    whose first process saves for all looks for that on each node; and of a tensor that all have alike
    `torch.distributed.checkpoint` writes one copy, into any process's file, where each process looks for it.
    """
    recorded: tuple[Entry, ...] = (*snapshot.files, *snapshot.links, *snapshot.folders)
    entries = [(*find_owner(entry.path, snapshot), entry) for entry in recorded]
    found: dict[str, tuple[int, Entry]] = {}
    folders: set[str] = set()
    for owner, path, entry in sorted(entries, key=lambda each: (each[0] != rank, each[0])):
        ancestors = {parent.as_posix() for parent in PurePosixPath(path).parents}
        blocking = {above for above in ancestors & found.keys() if not isinstance(found[above][1], FolderRecord)}
        is_known_folder = path in folders and not isinstance(entry, FolderRecord)
        if path not in found and not is_known_folder and not blocking:
            found[path] = owner, entry
            folders |= ancestors
    return found


def restore_part(store: Store, state: Artifact, rank: int, cache: Path, target: Path) -> Mapping[str, FileStamp]:
    """Make `target` what a node begins with; return what of it is others', and no part of this node's own state.

    Raises:
        BrokenArtifact: a file of it is missing, or is not the one that was published.
    """
    wanted = entries_for_node(rank, store.manifest(state))
    files = {path: entry for path, (_, entry) in wanted.items() if isinstance(entry, FileRecord)}
    fetched = store.fetch(state, cache, only=[file.path for file in files.values()])
    times = {
        owner: read_snapshot_times(store, state.uri, owner) for owner in {rank, *(owner for owner, _ in wanted.values())}
    }
    by_precedence = sorted(times, key=lambda owner: (owner == rank, owner == 0))
    folder_times = {path: time for owner in by_precedence for path, time in times[owner].items()}
    entry_times = {path: time for path, (owner, _) in wanted.items() if (time := times[owner].get(path)) is not None}
    links = {path: entry.target for path, (_, entry) in wanted.items() if isinstance(entry, LinkRecord)}
    while (escaping := find_escaping_link(links)) is not None:  # of one node alone it did not, with others' links it would
        del links[escaping]
    scratch = target.with_name(f".{target.name}.tmp")  # so that a kill leaves no half of it for the command
    remove_tree(scratch)
    write_tree(
        scratch,
        files,
        lambda path: fetched / files[path].path,
        folders=[
            FolderRecord(path=path, mode=entry.mode)
            for path, (_, entry) in wanted.items()
            if isinstance(entry, FolderRecord)
        ],
        links=[LinkRecord(path=path, target=text) for path, text in links.items()],
        times={**folder_times, **entry_times},
    )
    remove_tree(target)
    scratch.replace(target)
    now = scan_folder(target)
    return {path: now[path] for path, (owner, _) in wanted.items() if owner != rank and path in now}


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
