"""Publish one consistent snapshot of a command on several nodes."""

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from recipes.command.folder_scan import FileStamp, find_changed_files
from recipes.command.nodes import (
    COPY_CONSISTENT,
    FILES_COPIED,
    FILES_UNCHANGED,
    PART_STORED,
    POLL_SECONDS,
    SNAPSHOT_COMPLETE,
    SNAPSHOT_FAILED,
    NodeGroup,
    SnapshotRequest,
    is_reserved,
    merge_parts,
    node_prefix,
    restore_part,
)
from recipes.command.snapshot_publisher import (
    QUIET_TIMEOUT_SECONDS,
    CommandEnded,
    FilesChanged,
    SnapshotPublisher,
    scan_interval,
)
from recipes.command.snapshot_store import SnapshotStore
from recipes.runner import Restart, log_line
from recipes.storage.artifact_store import BrokenArtifact
from recipes.storage.buckets import StoreFull, StoreUnavailable
from recipes.storage.manifest import Artifact, Manifest

FINAL_TIMEOUT_SECONDS = 120.0
"""How long a command that failed, was killed or was asked to stop waits for the other nodes to end."""
UPLOAD_TIMEOUT_SECONDS = 3600.0
"""How long a node waits for the other nodes' parts to be uploaded."""


class NodesOutOfStep(Exception):
    """The nodes did not agree on a snapshot in time."""


class RequestSuperseded(Exception):
    """The leader has abandoned its request and asks for another snapshot."""


class SnapshotUnchanged(Exception):
    """No node's files have changed since the previous snapshot."""


class MultiNodePublisher(SnapshotPublisher):
    """Publishes the snapshots of one of several nodes; see `SnapshotPublisher`.

    Args:
        borrowed: the files in this node's folder that were restored from other nodes' parts.
    """

    is_single_node = False

    def __init__(
        self,
        folder: Path,
        states: SnapshotStore,
        template: Manifest,
        interval: float,
        record_usage: Callable[[], None],
        nodes: NodeGroup,
        borrowed: Mapping[str, FileStamp],
    ) -> None:
        super().__init__(folder, states, template, interval, record_usage)
        self._nodes = nodes
        self._foreign_files = borrowed
        self._current_request = SnapshotRequest("", last=False)
        self._latest: Artifact | None = None
        self._volatile_files: frozenset[str] = frozenset()
        """Files that are written all the time, such as logs.

        They are copied as they are, and a change in them alone makes no new snapshot.
        """
        self._urgent_since: float | None = None

    def scan_once(self) -> None:
        at = time.monotonic()
        if at >= self._usage_due_at:
            self.record_usage()
            self._usage_due_at = at + self.interval
        if self._nodes.is_leader and at < self._due_at:
            return
        snapshot_request = self._request(last=False) if self._nodes.is_leader else self._nodes.snapshot_request()
        if (
            snapshot_request is None
            or snapshot_request.last
            or (snapshot_request == self._current_request and not self._nodes.is_leader)
        ):
            return
        with suppress(SnapshotUnchanged, RequestSuperseded):
            self._publish_part(snapshot_request, self._wait_until_quiet)
        self._due_at = at + self.interval

    def _pause(self) -> float:
        return super()._pause() if self._nodes.is_leader else scan_interval(self.interval)

    def _publish(self) -> Artifact | None:
        copied: frozenset[str] = frozenset()
        while True:
            snapshot_request = self._request(last=True) if self._nodes.is_leader else self._wait_for_final_request()
            try:
                return self._publish_part(snapshot_request, self._scan, copied)
            except SnapshotUnchanged:
                return self._latest
            except FilesChanged as moved:
                copied |= moved.rewritten
            except RequestSuperseded:
                continue

    def _request(self, *, last: bool) -> SnapshotRequest:
        return self._nodes.request_snapshot(self.states.next_name(uuid.uuid4().hex), last=last)

    def _wait_for_final_request(self) -> SnapshotRequest:
        """Return the leader's request for the final snapshot, after its command has ended as well."""
        while (
            (snapshot_request := self._nodes.snapshot_request()) is None
            or not snapshot_request.last
            or snapshot_request == self._current_request
        ):
            self._check_final_timeout("the first node")
            time.sleep(POLL_SECONDS)
        return snapshot_request

    def _publish_part(
        self,
        snapshot_request: SnapshotRequest,
        look: Callable[[], Mapping[str, FileStamp]],
        copied: frozenset[str] = frozenset(),
    ) -> Artifact | None:
        self._current_request = snapshot_request
        try:
            scan = look()
            copied |= self.rewritten | self._volatile_files
            as_it_is = snapshot_request.last or bool(self._volatile_files)
            self._latest = self._publish_scan(scan, copied, allow_changes=as_it_is, can_abort=not snapshot_request.last)
        except BaseException:
            with suppress(StoreUnavailable):
                self._nodes.post_status(snapshot_request, SNAPSHOT_FAILED)
            raise
        self._published_files = scan
        return self._latest

    def _wait_until_quiet(self) -> Mapping[str, FileStamp]:
        """Return a scan once two scans agree, except for files that never stop changing."""
        until, before = time.monotonic() + QUIET_TIMEOUT_SECONDS / 2, self._scan()
        self._volatile_files = frozenset()
        while True:
            if self._ended.wait(scan_interval(self.interval)):
                raise CommandEnded
            now = self._scan()
            if self._without_volatile(now) == self._without_volatile(before):
                return now
            if time.monotonic() > until:
                self._volatile_files |= find_changed_files(before, now)
            before = now

    def _without_volatile(self, scan: Mapping[str, FileStamp]) -> dict[str, FileStamp]:
        return {path: stamp for path, stamp in scan.items() if path not in self._volatile_files}

    def _scan(self) -> dict[str, FileStamp]:
        """Return the files that belong to this node."""
        found = super()._scan()
        if self._nodes.is_leader and (taken := sorted(path for path in found if is_reserved(path))):
            self._log_once(
                f"checkpoints: {taken[0]} is not published: its name is reserved for other nodes' files, rename it"
            )
        return {path: stamp for path, stamp in found.items() if self._is_own(path, stamp)}

    def _is_own(self, path: str, stamp: FileStamp) -> bool:
        return self._foreign_files.get(path) != stamp and not (self._nodes.is_leader and is_reserved(path))

    def _agree_on_files(self, scan: Mapping[str, FileStamp]) -> None:
        snapshot_request = self._current_request
        if scan == self._published_files:
            self._nodes.post_status(snapshot_request, FILES_UNCHANGED)
        self._nodes.post_status(snapshot_request, FILES_COPIED)
        said = self._wait_for(FILES_COPIED)
        if len(said.get(FILES_UNCHANGED, ())) == self._nodes.size:
            raise SnapshotUnchanged
        if not snapshot_request.last and self._without_volatile(self._scan()) != self._without_volatile(scan):
            raise FilesChanged
        self._nodes.post_status(snapshot_request, COPY_CONSISTENT)
        self._wait_for(COPY_CONSISTENT)

    def _put_snapshot(
        self, scratch: Path, manifest: Manifest, times: Mapping[str, int], on_upload: Callable[[str], None]
    ) -> Artifact:
        snapshot_request, rank = self._current_request, self._nodes.rank
        uri = f"{self.states.location}/{snapshot_request.name}"
        part_uri = f"{uri}/{node_prefix(rank)}".rstrip("/")
        self.states.upload_files(part_uri, scratch, manifest, on_upload)
        self.states.put_times(snapshot_request.name, times, rank)
        self._nodes.post_status(snapshot_request, PART_STORED, manifest.to_bytes().decode())
        if not self._nodes.is_leader:
            self._wait_for(SNAPSHOT_COMPLETE, count=1)
            made = self.states.store.find(uri)
            assert made is not None
            return made
        self._wait_for(PART_STORED)
        parts = [
            Manifest.model_validate_json(self._nodes.text(snapshot_request, PART_STORED, node))
            for node in range(self._nodes.size)
        ]
        made = self.states.complete(snapshot_request.name, merge_parts(parts, self.template))
        self._nodes.post_status(snapshot_request, SNAPSHOT_COMPLETE)
        return made

    def _free_space(self, error: StoreFull) -> None:
        # every node's snapshots are stored there; the leader makes room before its next request
        if not self._nodes.is_leader:
            raise error
        super()._free_space(error)

    def _wait_for(self, status: str, count: int | None = None) -> dict[str, set[int]]:
        """Wait until `count` nodes, or all, have posted a status.

        Raises:
            CommandEnded: the command ended, and the request is for a snapshot of a running one.
            RequestSuperseded: the leader asks for another snapshot.
            NodesOutOfStep: a node did not answer in time, or failed.
            StoreUnavailable: a node failed in the final snapshot; the caller tries again.
        """
        snapshot_request, size = self._current_request, count or self._nodes.size
        until = time.monotonic() + (
            UPLOAD_TIMEOUT_SECONDS if status in (PART_STORED, SNAPSHOT_COMPLETE) else QUIET_TIMEOUT_SECONDS
        )
        while len((said := self._nodes.read_statuses(snapshot_request)).get(status, ())) < size:
            if not snapshot_request.last and self._ended.is_set():
                raise CommandEnded
            if not self._nodes.is_leader and self._nodes.snapshot_request() != snapshot_request:
                raise RequestSuperseded
            if others := sorted(said.get(SNAPSHOT_FAILED, set()) - {self._nodes.rank}):
                self._give_up(f"node {others[0]} could not take part")
            if not snapshot_request.last and time.monotonic() > until:
                raise NodesOutOfStep(f"not all nodes came within {QUIET_TIMEOUT_SECONDS:g} s")
            if snapshot_request.last:
                self._check_final_timeout("other nodes")
            time.sleep(min(POLL_SECONDS, scan_interval(self.interval)))
        return said

    def _give_up(self, reason: str) -> None:
        """End the current request.

        The leader repeats a final one after a pause, and the others wait for that.
        """
        if not self._current_request.last:
            raise NodesOutOfStep(reason)
        if self._nodes.is_leader:
            raise StoreUnavailable(reason)

    def _check_final_timeout(self, subject: str) -> None:
        """Limit how long a command that failed or must stop waits for other nodes.

        Raises:
            NodesOutOfStep: the limit is exceeded.
        """
        if not self.is_urgent():
            return
        now = time.monotonic()
        self._urgent_since = now if self._urgent_since is None else self._urgent_since
        if now - self._urgent_since > FINAL_TIMEOUT_SECONDS:
            raise NodesOutOfStep(f"{subject} did not end within {FINAL_TIMEOUT_SECONDS:g} s")


def restore_on_nodes(states: SnapshotStore, nodes: NodeGroup, cache: Path, checkpoints: Path) -> Mapping[str, FileStamp]:
    """Restore the snapshot that all nodes resume from.

    Return the files that belong to other nodes. Files that exist on this node alone do not count.

    Raises:
        Restart: not all nodes came, or a file is corrupt. The snapshot is then deleted, and the next start uses an older
        one.
    """
    uri = nodes.rendezvous(lambda: found.uri if (found := states.newest() or states.store.find(states.location)) else None)
    if uri is None:
        return {}
    state = states.store.find(uri)
    try:
        if state is None:
            raise BrokenArtifact(f"{uri} has no readable manifest")
        borrowed = restore_part(states.store, state, nodes.rank, cache, checkpoints)
    except BrokenArtifact as problem:
        states.delete(uri)
        raise Restart(f"the checkpoints at {uri} are incomplete: {problem}") from None
    log_line(f"checkpoints: restored the part of node {nodes.rank} from {state.uri}")
    return borrowed
