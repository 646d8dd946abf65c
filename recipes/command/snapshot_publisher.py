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
"""Between two looks; a fourth of an interval that is shorter than four of them."""
MIN_SCAN_INTERVAL_SECONDS = 0.05
QUIET_TIMEOUT_SECONDS = 300.0
"""How long a moment is waited for at which nothing moves."""
RETRY_SECONDS = 60.0
"""After a state that could not be published."""


class FilesChanged(Exception):
    """Files were written to, or taken away, while they were taken: together they would be no state that ever was."""

    def __init__(self, rewritten: Collection[str] = ()) -> None:
        super().__init__("files changed while they were published")
        self.rewritten = frozenset(rewritten)


class CommandEnded(Exception):
    """The command has ended meanwhile: what it left is published instead."""


class SnapshotPublisher:
    """Of one command, beside it in a thread. Of one that runs on several nodes: `recipes.command.multi_node_publisher`.

    Args:
        folder: where the command leaves what it needs to go on.
        made_of: a manifest without files, which says what the states come from.
        interval: seconds between two states.
        account: called as often; writes down what the command has used so far.
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
        """Files that the command writes over as they are: of those a copy is taken, a link would change with them."""
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
        """The command has ended. A state on its way never becomes one: no more than the file that is sent arrives.

        Args:
            hurries: whether other nodes, whose commands go on, are waited for no longer than a moment.
        """
        self.is_urgent = is_urgent
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def publish(self) -> Artifact | None:
        """What a command left that has ended, as its newest state; None where it left nothing.

        Files that were sent already are not sent again: of a state that was on its way, or where this has raised before.
        In a full store states of before make room for it.

        Raises:
            StoreFull: it is not enough.
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
            except FilesChanged as moved:  # by who hides from us; a file that is copied moves no more
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
            except Exception as error:  # of the store, or of the disk: the command goes on
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
        """Publish what a look has found.

        Raises:
            FilesChanged: a file that is no copy was written to meanwhile; or anything was since the look, unless
                `allow_changes`.
            CommandEnded: the command has ended, and this `can_abort` with it.
            NoSpaceForCopy: this `can_abort`, and the command needs the room that a copy would take.
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
        log_line(f"checkpoints: {error}; of the states before this one only the newest stays")
        self.states.free_space()

    def _scan(self) -> dict[str, FileStamp]:
        return scan_folder(self.folder, self._report_unreadable)

    def _agree_on_files(self, scan: Mapping[str, FileStamp]) -> None:
        """Nobody else needs to have taken his files at the same moment."""

    def _differs(self, scan: Mapping[str, FileStamp]) -> bool:
        """Whether the folder has changed since the scan; what is new since then does not count."""
        now = self._scan()
        return any(now.get(path) != stamp for path, stamp in scan.items() if is_recorded(stamp))

    def _put_snapshot(
        self, scratch: Path, manifest: Manifest, times: Mapping[str, int], on_upload: Callable[[str], None]
    ) -> Artifact:
        """A try that fails leaves no more than itself: one a minute filled the store with what never became a state."""
        try:
            return self.states.put_snapshot(scratch, manifest, on_upload, times)
        except CommandEnded:
            raise
        except Exception as error:
            with suppress(StoreUnavailable):
                self.states.remove_incomplete(keep_newest=not isinstance(error, StoreFull))
            raise

    def _report_unreadable(self, error: OSError) -> None:
        """One entry that cannot be published does not keep all others from it."""
        self._log_once(f"checkpoints: {error.filename} is not published: {error.strerror}")

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log_line(text)


def describe_folders(scan: Mapping[str, FileStamp]) -> tuple[FolderRecord, ...]:
    """The folders that files alone would not bring back."""
    found = sorted(path for path, stamp in scan.items() if stamp.kind is EntryKind.FOLDER and is_recorded(stamp))
    return tuple(FolderRecord(path=path, mode=None if scan[path].mode == FOLDER_MODE else scan[path].mode) for path in found)


def describe_links(scan: Mapping[str, FileStamp]) -> tuple[LinkRecord, ...]:
    """The links, without those that would leave the folder: a state that has one could not be restored."""
    links = {path: stamp.link for path, stamp in scan.items() if stamp.kind is EntryKind.LINK}
    while (escaping := find_escaping_link(links)) is not None:
        log_line(f"checkpoints: the link {escaping} -> {links.pop(escaping)} is not published: it leaves the folder")
    return tuple(LinkRecord(path=path, target=links[path]) for path in sorted(links))


def seconds_until_scan(now: float, due: float, accounts_at: float, interval: float) -> float:
    """Seconds until the next look. Two are needed before a state is due; of those before them all would be for nothing."""
    return max(scan_interval(interval), min(due - 2 * scan_interval(interval), accounts_at) - now)


def scan_interval(interval: float) -> float:
    """Seconds between two looks."""
    return min(SCAN_INTERVAL_SECONDS, max(interval / 4, MIN_SCAN_INTERVAL_SECONDS))
