"""Pods that share a preparation: each does units of its own, and gives the others what they need through the object store.

They share nothing else. What a pod gives depends on the input alone: so one that is started again, with empty folders or
not, finds in the store what was given before, does the rest, and may give anything twice.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

from recipes.preparation.plan import written
from recipes.runner import say
from recipes.storage.artifact_store import Store

POLL_SECONDS = 1.0
AT_ONCE = 16
"""Files on their way at a time: most are small, and there are some of each range, one after the other for hours of 10 TB."""
WINDOW = 256
"""Files of which those that are there are taken before the first that is missing is waited for."""
SAY_EVERY_SECONDS = 60.0


class ResultIsThere(Exception):
    """The first pod has all that it needed, and what the pods gave each other is deleted, or soon will be."""


class Pods:
    """One pod, which has all units and all files itself."""

    rank, count = 0, 1

    def own(self, units: int) -> range:
        """The units of this pod, such as ranges, that are spread over all pods."""
        return range(self.rank, units, self.count)

    def run_of(self, units: int, rank: int) -> tuple[int, int]:
        """First unit, and first that is no more, of those that a pod has where they should lie side by side."""
        return units * rank // self.count, units * (rank + 1) // self.count

    def has(self, path: Path) -> bool:
        """Whether a file was given, by this pod before it was started again too."""
        return False

    def give(self, *paths: Path) -> None:
        """Let the other pods have files, in this order: one that says that others are there is given after them."""

    def give_all(self, units: Iterable[Sequence[Path]]) -> None:
        """Let the other pods have the files of many units, of which those of one are given in their order."""

    def take(self, paths: Iterable[Path]) -> None:
        """Have files that some pods give: wait for them if need be."""


class PodsOfMany(Pods):
    """One of several pods. Files are known by where they lie below `work`, and lie below `uri` meanwhile.

    `is_over` says whether the job has its result. A pod that was started again just then waited for what was deleted.
    """

    def __init__(
        self,
        store: Store,
        uri: str,
        work: Path,
        rank: int,
        count: int,
        is_over: Callable[[], bool],
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.rank, self.count = rank, count
        self._store = store
        self._uri = uri
        self._work = work
        self._is_over = is_over
        self._poll_seconds = poll_seconds

    def _place(self, path: Path) -> str:
        return f"{self._uri}/{path.relative_to(self._work).as_posix()}"

    def has(self, path: Path) -> bool:
        try:
            self._store.size(self._place(path))
        except FileNotFoundError:
            return False
        return True

    def give(self, *paths: Path) -> None:
        for path in paths:
            self._store.put_file(self._place(path), path, parts_at_once=1)  # of so many files at once

    def give_all(self, units: Iterable[Sequence[Path]]) -> None:
        waiting = iter(units)
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="give") as threads:
            while window := [*islice(waiting, WINDOW)]:
                for _ in threads.map(lambda paths: self.give(*paths), window):
                    pass

    def take(self, paths: Iterable[Path]) -> None:
        """Raises ResultIsThere: there is nothing more to take."""
        waiting = iter(paths)
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="take") as threads:
            while missing := [*islice(waiting, WINDOW)]:
                while missing := [path for path in missing if not path.is_file()]:
                    self._wait_for(missing[0])
                    for _ in threads.map(self._take_given, missing):
                        pass

    def _take_given(self, path: Path) -> None:
        """Have a file here, if it was given already. One that is given anew just now is tried again."""
        with suppress(FileNotFoundError):
            given = self._store.open(self._place(path))
            with written(path) as part, part.open("wb") as out:
                for piece in given.chunks():
                    out.write(piece)

    def _wait_for(self, path: Path) -> None:
        said = time.monotonic()
        while not self.has(path):
            if self._is_over():
                raise ResultIsThere
            if time.monotonic() - said > SAY_EVERY_SECONDS:
                said = time.monotonic()
                say(f"waiting for {path.relative_to(self._work)} of another pod")
            time.sleep(self._poll_seconds)
