"""Coordinate a command's nodes through the store, and assign each its part of a snapshot."""

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

# In a snapshot of a command on several nodes, the first node's files keep their paths, so that they are found as those of a
# single node are. The files of node 1 are below `.nodes/1`, which is deeper than any path of a similar name.

NODES_FACT = "nodes"
"""The manifest fact with the number of nodes that have a part. Snapshots from before there were parts have none."""
NODES_FOLDER = ".nodes"


def node_prefix(rank: int) -> str:
    return f"{NODES_FOLDER}/{rank}/" if rank else ""


def is_reserved(path: str) -> bool:
    """Return whether a path is reserved for the files of other nodes."""
    return path.startswith(f"{NODES_FOLDER}/")


Entry = FileRecord | FolderRecord | LinkRecord


def merge_parts(parts: Sequence[Manifest], template: Manifest) -> Manifest:
    """Merge the parts, ordered by rank, into one manifest."""
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
    """Return the rank of the node that owns a file, and its path there."""
    if NODES_FACT not in snapshot.facts or not is_reserved(path):
        return 0, path
    _, rank, own = path.split("/", 2)
    return int(rank), own


def entries_for_node(rank: int, snapshot: Manifest) -> dict[str, tuple[int, Entry]]:
    """Return the entries that a node starts with, each with its owner's rank.

    The keys are paths in the node's folder. The entries are the node's own and, at other paths, those of other nodes, the
    first node's before all others: as if they had shared a folder. If a script's first process saves for all, each node
    reads that file. And if all processes have the same tensor, `torch.distributed.checkpoint` writes one copy into any
    process's file, and each process reads it there.
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
    """Make `target` the folder that a node starts with.

    Returns the entries that belong to other nodes, which are not part of this node's own snapshots.

    Raises:
        BrokenArtifact: a file is missing, or differs from the published one.
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
    # within one node's part it stayed inside, but other nodes' links lead it out
    while (escaping := find_escaping_link(links)) is not None:
        del links[escaping]
    scratch = target.with_name(f".{target.name}.tmp")  # so that a kill leaves no partial folder for the command
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


# The nodes that run a command together share only the store, and communicate through it.
#
# They meet at each start. Then the leader asks for a snapshot, and each node posts how far it is. No clocks are compared:
# each node copies its files, waits until all have copied theirs, and then scans again. If nothing has changed by then, all
# copies show one moment, namely that of the last copy. A snapshot therefore never mixes files of two steps.

RENDEZVOUS_TIMEOUT_SECONDS = 900.0
"""How long a node waits for the others at the start; torchrun waits as long."""
POLL_SECONDS = 1.0
FILES_COPIED, FILES_UNCHANGED, COPY_CONSISTENT, PART_STORED, SNAPSHOT_COMPLETE, SNAPSHOT_FAILED = (
    "taken",
    "same",
    "still",
    "part",
    "made",
    "not",
)
"""The statuses of a node for a snapshot, in this order.

It has copied its files; they are those of the previous snapshot; they had not changed when all nodes had copied theirs; its
part is stored; the snapshot is complete; or there will be none.
"""


@dataclass(frozen=True)
class SnapshotRequest:
    """A snapshot that the leader asks for.

    `last` marks the one after the commands have ended.
    """

    name: str
    last: bool


class NodeGroup:
    """One node's view of all nodes.

    Args:
        location: the logical URI below which the job's snapshots are stored.
        rank: 0 is the leader.
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
        """Wait for the other nodes.

        Return the URI of the snapshot that all resume from, the leader's `newest`. An answer to a call of an earlier start,
        or from a node that has been replaced since, does not count.

        Raises:
            Restart: not all nodes came in time.
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
        raise Restart(f"not all of {self.size} nodes started within {RENDEZVOUS_TIMEOUT_SECONDS:g} s")

    def _start(self, rendezvous_id: str, newest: Callable[[], str | None]) -> dict[str, str | None] | None:
        """On the leader: return the state to resume from, once all other nodes have answered."""
        answers = {str(rank): self._read(f"{rendezvous_id}/node-{rank}") for rank in range(1, self.size)}
        if None in answers.values():
            return None
        for uri in self._store.list(self._uri):  # of earlier meetings
            if not uri.startswith((f"{self._uri}/{rendezvous_id}/", f"{self._uri}/call")):
                self._store.delete(uri)
        state = {"uri": newest()}
        self._write(f"{rendezvous_id}/begin", json.dumps({"nodes": answers, "state": state}))
        self._rendezvous_id = rendezvous_id
        return state

    def _join(self, own_id: str) -> dict[str, str | None] | None:
        """Return, on the other nodes, the state to resume from.

        None until the leader has read this node's answer.
        """
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
        """On the leader: ask for a snapshot of this name.

        Statuses of the previous one are deleted.
        """
        if self._current_request:
            self._store.delete(f"{self._uri}/{self._rendezvous_id}/said/{self._current_request.name}")
        self._current_request = SnapshotRequest(name, last)
        self._write(f"{self._rendezvous_id}/asked", json.dumps({"name": name, "last": last}))
        return self._current_request

    def snapshot_request(self) -> SnapshotRequest | None:
        """Return the leader's latest request."""
        text = self._read(f"{self._rendezvous_id}/asked")
        return SnapshotRequest(**json.loads(text)) if text else None

    def post_status(self, snapshot_request: SnapshotRequest, status: str, text: str = "") -> None:
        self._write(f"{self._rendezvous_id}/said/{snapshot_request.name}/{status}-{self.rank}", text)

    def read_statuses(self, snapshot_request: SnapshotRequest) -> dict[str, set[int]]:
        """Return the ranks that have posted each status."""
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
