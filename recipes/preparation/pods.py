"""Pods that share a preparation: each does units of its own, and gives the others what they need through the object store.

They share nothing else. What a pod gives depends on the input alone: so one that is started again, with empty folders or
not, finds in the store what was given before, does the rest, and may give anything twice.
"""

import time
from collections.abc import Callable
from pathlib import Path

from recipes.preparation.plan import written
from recipes.runner import say
from recipes.store import Store

POLL_SECONDS = 1.0
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

    def give(self, path: Path) -> None:
        """Let the other pods have a file. One that says that others are there is given after them."""

    def take(self, path: Path) -> None:
        """Have a file that some pod gives: wait for it if need be."""


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

    def give(self, path: Path) -> None:
        self._store.put_file(self._place(path), path)

    def take(self, path: Path) -> None:
        """Raises ResultIsThere: there is nothing more to take."""
        if path.is_file():
            return
        self._wait_for(path)
        try:
            with written(path) as part, part.open("wb") as out:
                for piece in self._store.open(self._place(path)).chunks():
                    out.write(piece)
        except FileNotFoundError:
            if self._is_over():
                raise ResultIsThere from None
            raise

    def _wait_for(self, path: Path) -> None:
        said = time.monotonic()
        while not self.has(path):
            if self._is_over():
                raise ResultIsThere
            if time.monotonic() - said > SAY_EVERY_SECONDS:
                said = time.monotonic()
                say(f"waiting for {path.relative_to(self._work)} of another pod")
            time.sleep(self._poll_seconds)
