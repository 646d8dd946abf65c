"""Publishes what a command leaves in its checkpoints folder while it runs: a machine that dies takes no more with it than an
interval's work (rows I1, I3, I9, I13).

It waits for a moment at which nothing there is being written: two looks that find the same. Of a folder in which something
always moves it takes what it finds, as a kill would leave it. A script whose files are never half there writes each under
another name in the same folder, and renames it when it is whole; then no copy is needed either.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from recipes.command.look import Stamp, changed, look, look_at
from recipes.command.snapshot_copy import NoRoom, Taken, Taking
from recipes.command.snapshot_store import States
from recipes.counted import counted
from recipes.runner import say
from recipes.storage.artifact_store import MANIFEST
from recipes.storage.buckets import StoreFull, StoreUnavailable
from recipes.storage.manifest import Artifact, Manifest

LOOK_SECONDS = 5.0
"""Between two looks; a fourth of an interval that is shorter than four of them."""
SHORTEST_SECONDS = 0.05
PATIENCE_SECONDS = 300.0
"""How long a moment is waited for at which nothing moves."""
RETRY_SECONDS = 60.0
"""After a state that could not be published."""


class Moved(Exception):
    """Files were written to, or taken away, while they were taken: together they would be no state that ever was."""

    def __init__(self, rewritten: Collection[str] = ()) -> None:
        super().__init__("files changed while they were published")
        self.rewritten = frozenset(rewritten)


class Ended(Exception):
    """The command has ended meanwhile: what it left is published instead."""


class Saving:
    """Of one command, beside it in a thread. Of one that runs on several nodes: `recipes.command.multi_node_publisher`.

    Args:
        folder: where the command leaves what it needs to go on.
        made_of: a manifest without files, which says what the states come from.
        interval: seconds between two states.
        account: called as often; writes down what the command has used so far.
    """

    is_alone = True

    def __init__(
        self, folder: Path, states: States, made_of: Manifest, interval: float, account: Callable[[], None]
    ) -> None:
        self.folder = folder
        self.states = states
        self.made_of = made_of
        self.interval = interval
        self.account = account
        self._taking = Taking(folder, self._leave_out)
        self.rewritten: frozenset[str] = frozenset()
        """Files that the command writes over as they are: of those a copy is taken, a link would change with them."""
        self._said: set[str] = set()
        self._before: Mapping[str, Stamp] = {}
        self._saved: Mapping[str, Stamp] = {}
        self._due = self._accounts_at = time.monotonic() + interval
        self._waits_since: float | None = None
        self._ended = threading.Event()
        self.hurries: Callable[[], bool] = lambda: False
        self._thread = threading.Thread(target=self._follow, name="saving", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self, hurries: Callable[[], bool] = lambda: False) -> None:
        """The command has ended. A state on its way never becomes one: no more than the file that is sent arrives.

        Args:
            hurries: whether other nodes, whose commands go on, are waited for no longer than a moment.
        """
        self.hurries = hurries
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
        if any(self.folder.rglob(MANIFEST)):
            say(f"files called {MANIFEST} are not published: an artifact's own list of files has that name")
        try:
            return self._publish()
        except StoreFull as error:
            self._make_room(error)
        return self._publish()

    def _publish(self) -> Artifact | None:
        copied: frozenset[str] = frozenset()
        while True:
            try:
                return self._save(self._look(), copied, as_it_is=True)
            except Moved as moved:  # by who hides from us; a file that is copied moves no more
                copied |= moved.rewritten

    def _follow(self) -> None:
        while not self._ended.wait(self._pause()):
            try:
                self.look_once()
            except Moved as moved:
                self.rewritten |= moved.rewritten
            except Ended:
                return
            except NoRoom as error:
                self._say_once(f"checkpoints: not published while the command runs, {error}")
                self._due = time.monotonic() + self.interval
            except Exception as error:  # of the store, or of the disk: the command goes on
                say(f"checkpoints: not published, {type(error).__name__}: {' '.join(str(error).split())}")
                self._due = time.monotonic() + min(RETRY_SECONDS, self.interval)

    def _pause(self) -> float:
        return pause(time.monotonic(), self._due, self._accounts_at, self.interval)

    def look_once(self) -> None:
        at = time.monotonic()
        if at >= self._accounts_at:
            self.account()
            self._accounts_at = at + self.interval
        now = self._look()
        moving, self._before = changed(self._before, now), now
        if at < self._due or now == self._saved:
            self._waits_since = None
            return
        self._waits_since = at if self._waits_since is None else self._waits_since
        as_it_is = at - self._waits_since > PATIENCE_SECONDS
        if moving and not as_it_is:
            return
        self._save(now, self.rewritten | moving, as_it_is=as_it_is, may_end=True)
        self._saved, self._waits_since, self._due = now, None, at + self.interval

    def _save(
        self, seen: Mapping[str, Stamp], copied: Collection[str], *, as_it_is: bool, may_end: bool = False
    ) -> Artifact | None:
        """Publish what a look has found.

        Raises:
            Moved: a file that is no copy was written to meanwhile; or anything was since the look, unless `as_it_is`.
            Ended: the command has ended, and this `may_end` with it.
            NoRoom: this `may_end`, and the command needs the room that a copy would take.
        """
        if not seen and self.is_alone:
            return None

        def unless_ended(paths: Iterable[str]) -> Iterator[str]:
            for path in paths:
                if may_end and self._ended.is_set():
                    raise Ended
                yield path

        scratch = self._taking.begin(beside_command=may_end)
        try:
            taken = {path: self._taking.take(path, as_copy=path in copied) for path in unless_ended(seen)}
            if not as_it_is and {path: look_at(self.folder / path) for path in seen} != seen:
                raise Moved
            self._agree(seen)
            linked = {path: seen[path] for path, how in taken.items() if how is Taken.LINKED}
            there = sorted((path for path, how in taken.items() if how is not Taken.GONE), key=PurePosixPath)
            described = [self._taking.described(path, linked.get(path)) for path in unless_ended(there)]
            files = tuple(file for file in described if file)
            if not files and self.is_alone:
                return None

            def sent(path: str) -> None:
                if may_end and self._ended.is_set():
                    raise Ended
                if path in linked and linked[path] != look_at(scratch / path):
                    raise Moved({path for path, stamp in linked.items() if stamp != look_at(scratch / path)})

            made = self._put(scratch, self.made_of.model_copy(update={"files": files}), sent)
        finally:
            self._taking.end()
        say(f"checkpoints: {counted(made.size_bytes, 'byte')} at {made.uri}")
        return made

    def _make_room(self, error: StoreFull) -> None:
        say(f"checkpoints: {error}; of the states before this one only the newest stays")
        self.states.make_room()

    def _look(self) -> dict[str, Stamp]:
        return look(self.folder, self._leave_out)

    def _agree(self, seen: Mapping[str, Stamp]) -> None:
        """Nobody else needs to have taken his files at the same moment."""

    def _put(self, scratch: Path, manifest: Manifest, sent: Callable[[str], None]) -> Artifact:
        """A try that fails leaves no more than itself: one a minute filled the store with what never became a state."""
        try:
            return self.states.put(scratch, manifest, sent)
        except Ended:
            raise
        except Exception as error:
            with suppress(StoreUnavailable):
                self.states.remove_begun(but_newest=not isinstance(error, StoreFull))
            raise

    def _leave_out(self, error: PermissionError) -> None:
        """One file that may not be read does not keep all others from being published."""
        self._say_once(f"checkpoints: {error.filename} is not published: {error.strerror}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)


def pause(now: float, due: float, accounts_at: float, interval: float) -> float:
    """Seconds until the next look. Two are needed before a state is due; of those before them all would be for nothing."""
    return max(every(interval), min(due - 2 * every(interval), accounts_at) - now)


def every(interval: float) -> float:
    """Seconds between two looks."""
    return min(LOOK_SECONDS, max(interval / 4, SHORTEST_SECONDS))
