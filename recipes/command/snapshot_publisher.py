"""Publish snapshots of a command's checkpoints while it runs."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from recipes.command.folder_scan import (
    EntryKind,
    FileStamp,
    find_changed_files,
    is_recorded,
    scan_folder,
    stat_file,
)
from recipes.command.snapshot_copy import CopyResult, NoSpaceForCopy, SnapshotCopy
from recipes.command.snapshot_store import SnapshotStore
from recipes.contracts.quantities import pluralize
from recipes.runner import log_line
from recipes.storage.buckets import StoreFull, StoreUnavailable
from recipes.storage.folder_tree import FOLDER_MODE, find_escaping_link
from recipes.storage.manifest import Artifact, FolderRecord, LinkRecord, Manifest

SCAN_INTERVAL_SECONDS = 5.0
"""Time between two scans; a fourth of the interval if that is shorter."""
MIN_SCAN_INTERVAL_SECONDS = 0.05
QUIET_TIMEOUT_SECONDS = 300.0
"""How long to wait for a moment without changes."""
RETRY_SECONDS = 60.0
"""Pause after a snapshot could not be published."""


class FilesChanged(Exception):
    """Files were changed or removed while they were copied.

    The copies together would show a state that never existed.
    """

    def __init__(self, rewritten: Collection[str] = ()) -> None:
        super().__init__("files changed while they were published")
        self.rewritten = frozenset(rewritten)


class CommandEnded(Exception):
    """The command has ended meanwhile: its final files are published instead."""


class SnapshotPublisher:
    """Publishes the snapshots of one command, in a thread next to it.

    `recipes.command.multi_node_publisher` does so on several nodes.

    Args:
        folder: where the command saves what it needs to resume.
        template: a manifest without files that names the snapshots' inputs.
        interval: seconds between two snapshots.
        record_usage: called at the same interval; stores what the command has used so far.
    """

    is_single_node = True

    def __init__(
        self, folder: Path, states: SnapshotStore, template: Manifest, interval: float, record_usage: Callable[[], None]
    ) -> None:
        self.folder = folder
        self.states = states
        self.template = template
        self.interval = interval
        self.record_usage = record_usage
        self._copy = SnapshotCopy(folder, self._report_unreadable)
        self.rewritten: frozenset[str] = frozenset()
        """Files that the command overwrites in place. They are copied, because a link would change with them."""
        self._logged: set[str] = set()
        self._previous_scan: Mapping[str, FileStamp] = {}
        self._published_files: Mapping[str, FileStamp] = {}
        self._due_at = self._usage_due_at = time.monotonic() + interval
        self._waiting_since: float | None = None
        self._ended = threading.Event()
        self.is_urgent: Callable[[], bool] = lambda: False
        self._thread = threading.Thread(target=self._run, name="saving", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Stop publishing after the command has ended.

        A snapshot in progress is abandoned after the current file.

        Args:
            is_urgent: whether to wait only briefly for other nodes whose commands still run.
        """
        self.is_urgent = is_urgent
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def publish(self) -> Artifact | None:
        """Publish the files that a command left as its newest snapshot.

        Returns None if there are none. Files that were uploaded already, for an abandoned snapshot or before this raised,
        are not uploaded again. If the store is full, older snapshots are deleted to make room.

        Raises:
            StoreFull: there is still not enough room.
            StoreUnavailable: the store does not answer.
        """
        try:
            return self._publish()
        except StoreFull as error:
            self._free_space(error)
        return self._publish()

    def _publish(self) -> Artifact | None:
        copied: frozenset[str] = frozenset()
        while True:
            try:
                return self._publish_scan(self._scan(), copied, allow_changes=True)
            except FilesChanged as moved:  # by a process that escaped from the group; a copied file no longer changes
                copied |= moved.rewritten

    def _run(self) -> None:
        while not self._ended.wait(self._pause()):
            try:
                self.scan_once()
            except FilesChanged as moved:
                self.rewritten |= moved.rewritten
            except CommandEnded:
                return
            except NoSpaceForCopy as error:
                self._log_once(f"checkpoints: not published while the command runs, {error}")
                self._due_at = time.monotonic() + self.interval
            except Exception as error:  # of the store or the disk: the command continues
                log_line(f"checkpoints: not published, {type(error).__name__}: {' '.join(str(error).split())}")
                self._due_at = time.monotonic() + min(RETRY_SECONDS, self.interval)

    def _pause(self) -> float:
        return seconds_until_scan(time.monotonic(), self._due_at, self._usage_due_at, self.interval)

    def scan_once(self) -> None:
        at = time.monotonic()
        if at >= self._usage_due_at:
            self.record_usage()
            self._usage_due_at = at + self.interval
        now = self._scan()
        moving, self._previous_scan = find_changed_files(self._previous_scan, now), now
        if at < self._due_at or now == self._published_files:
            self._waiting_since = None
            return
        self._waiting_since = at if self._waiting_since is None else self._waiting_since
        as_it_is = at - self._waiting_since > QUIET_TIMEOUT_SECONDS
        if moving and not as_it_is:
            return
        self._publish_scan(now, self.rewritten | moving, allow_changes=as_it_is, can_abort=True)
        self._published_files, self._waiting_since, self._due_at = now, None, at + self.interval

    def _publish_scan(
        self, scan: Mapping[str, FileStamp], copied: Collection[str], *, allow_changes: bool, can_abort: bool = False
    ) -> Artifact | None:
        """Publish the files of a scan.

        Raises:
            FilesChanged: a linked file was written to meanwhile; or anything changed since the scan, unless `allow_changes`.
            CommandEnded: the command has ended, and `can_abort` is set.
            NoSpaceForCopy: `can_abort` is set, and the command needs the disk space.
        """
        if not scan and self.is_single_node:
            return None

        def unless_ended(paths: Iterable[str]) -> Iterator[str]:
            for path in paths:
                if can_abort and self._ended.is_set():
                    raise CommandEnded
                yield path

        scratch = self._copy.begin(command_is_running=can_abort)
        try:
            found = [path for path, stamp in scan.items() if stamp.kind is EntryKind.FILE]
            copies = {path: self._copy.copy_file(path, as_copy=path in copied) for path in unless_ended(found)}
            if not allow_changes and self._differs(scan):
                raise FilesChanged
            self._agree_on_files(scan)
            linked_files = {path: scan[path] for path, how in copies.items() if how is CopyResult.LINKED}
            present = sorted((path for path, how in copies.items() if how is not CopyResult.GONE), key=PurePosixPath)
            described = [
                self._copy.describe_file(path, linked_files.get(path), scan[path].mode) for path in unless_ended(present)
            ]
            files = tuple(file for file in described if file)
            folders, links = describe_folders(scan), describe_links(scan)
            if not (files or folders or links) and self.is_single_node:
                return None

            def on_upload(path: str) -> None:
                if can_abort and self._ended.is_set():
                    raise CommandEnded
                if path in linked_files and linked_files[path] != stat_file(scratch / path):
                    raise FilesChanged({path for path, stamp in linked_files.items() if stamp != stat_file(scratch / path)})

            manifest = self.template.model_copy(update={"files": files, "folders": folders, "links": links})
            times = {path: stamp.modified_ns for path, stamp in scan.items() if copies.get(path) is not CopyResult.GONE}
            made = self._put_snapshot(scratch, manifest, times, on_upload)
        finally:
            self._copy.end()
        log_line(f"checkpoints: {pluralize(made.size_bytes, 'byte')} at {made.uri}")
        return made

    def _free_space(self, error: StoreFull) -> None:
        log_line(f"checkpoints: {error}; only the newest of the earlier snapshots is kept")
        self.states.free_space()

    def _scan(self) -> dict[str, FileStamp]:
        return scan_folder(self.folder, self._report_unreadable)

    def _agree_on_files(self, scan: Mapping[str, FileStamp]) -> None:
        """Do nothing: on a single node, there is nothing to agree on."""

    def _differs(self, scan: Mapping[str, FileStamp]) -> bool:
        """Return whether the folder has changed since the scan; new entries do not count."""
        now = self._scan()
        return any(now.get(path) != stamp for path, stamp in scan.items() if is_recorded(stamp))

    def _put_snapshot(
        self, scratch: Path, manifest: Manifest, times: Mapping[str, int], on_upload: Callable[[str], None]
    ) -> Artifact:
        """Upload a snapshot. A failed attempt deletes earlier incomplete ones.

        One attempt a minute once filled the store with incomplete snapshots.
        """
        try:
            return self.states.put_snapshot(scratch, manifest, on_upload, times)
        except CommandEnded:
            raise
        except Exception as error:
            with suppress(StoreUnavailable):
                self.states.remove_incomplete(keep_newest=not isinstance(error, StoreFull))
            raise

    def _report_unreadable(self, error: OSError) -> None:
        """Log an entry that cannot be published; all others still are."""
        self._log_once(f"checkpoints: {error.filename} is not published: {error.strerror}")

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log_line(text)


def describe_folders(scan: Mapping[str, FileStamp]) -> tuple[FolderRecord, ...]:
    """Return the folders that restoring the files would not create."""
    found = sorted(path for path, stamp in scan.items() if stamp.kind is EntryKind.FOLDER and is_recorded(stamp))
    return tuple(FolderRecord(path=path, mode=None if scan[path].mode == FOLDER_MODE else scan[path].mode) for path in found)


def describe_links(scan: Mapping[str, FileStamp]) -> tuple[LinkRecord, ...]:
    """Return the links, without those that leave the folder.

    A snapshot with one could not be restored.
    """
    links = {path: stamp.link for path, stamp in scan.items() if stamp.kind is EntryKind.LINK}
    while (escaping := find_escaping_link(links)) is not None:
        log_line(f"checkpoints: the link {escaping} -> {links.pop(escaping)} is not published: it leaves the folder")
    return tuple(LinkRecord(path=path, target=links[path]) for path in sorted(links))


def seconds_until_scan(now: float, due: float, accounts_at: float, interval: float) -> float:
    """Return the seconds until the next scan.

    Two scans are needed before a snapshot is due; earlier ones would be useless.
    """
    return max(scan_interval(interval), min(due - 2 * scan_interval(interval), accounts_at) - now)


def scan_interval(interval: float) -> float:
    """Return the seconds between two scans."""
    return min(SCAN_INTERVAL_SECONDS, max(interval / 4, MIN_SCAN_INTERVAL_SECONDS))
