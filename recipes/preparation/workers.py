"""Worker processes and pods that share the units of a stage."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from recipes.preparation.plan import atomic_path
from recipes.runner import log_line
from recipes.storage.artifact_store import Store

# Processes that share the units of a stage.
#
# They are told over a pipe of their own, which ends with whoever started them: a pool of `concurrent.futures` whose owner
# is killed leaves its processes waiting for ever.

Unit = Callable[..., Any]
JOIN_TIMEOUT_SECONDS = 30.0
"""What a process has for its end, of which nothing is wanted any more."""


def run_worker(pipe: Connection) -> None:
    """Do what comes over the pipe, one call at a time, until it ends: of the unit that came last."""
    unit: Unit | None = None
    # Records are trees: looking for cycles among thousands of them again and again took a tenth of the time.
    gc.disable()
    while True:
        try:
            next_unit, arguments = pipe.recv()
        except (EOFError, ConnectionError):
            return
        unit = next_unit or unit
        assert unit is not None
        try:
            answer: Any = unit(*arguments)
        except Exception as error:
            answer = error
        gc.collect(0)  # of what this unit made: all that was there before stays
        try:
            pipe.send(answer)
        except ConnectionError:
            return


class Workers:
    """`count` processes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> Self:
        # Not forked: a copy of this process would hold the pipes of the others open, and its threads' locks.
        context = get_context("spawn")
        for _ in range(self.count):
            own_end, worker_end = context.Pipe()
            process = context.Process(target=run_worker, args=(worker_end,), daemon=True)
            process.start()
            worker_end.close()
            self._pipes.append(own_end)
            self._processes.append(process)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if error is not None:
                process.terminate()
            process.join(JOIN_TIMEOUT_SECONDS)
            if process.is_alive():  # it hangs while it ends, and nobody waits for anything of it
                process.kill()
                process.join()

    def run(self, unit: Unit, calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """What `unit` answers to each call, as they are done. Raises what a unit raised.

        The unit goes to each process once, with all that is bound to it: what is the same for all calls may be large.
        """
        waiting = iter(calls)
        busy = [pipe for pipe in self._pipes if send_next_call(pipe, waiting, unit)]
        while busy:
            for pipe in wait(busy):
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionError):
                    raise RuntimeError("a worker was killed, perhaps for its memory: start it again, it goes on") from None
                if isinstance(answer, Exception):
                    raise answer
                if not send_next_call(pipe, waiting):
                    busy.remove(pipe)
                yield answer


def send_next_call(pipe: Connection, waiting: Iterator[tuple[Any, ...]], unit: Unit | None = None) -> bool:
    """Send the next call over a pipe, of another unit than the call before if need be; False when there is none."""
    arguments = next(waiting, None)
    if arguments is None:
        return False
    pipe.send((unit, arguments))
    return True


# Pods that share a preparation: each does units of its own, and gives the others what they need through the object store.
#
# They share nothing else. What a pod gives depends on the input alone: so one that is started again, with empty folders
# or not, finds in the store what was given before, does the rest, and may give anything twice.

POLL_SECONDS = 1.0
CONCURRENT_FILES = 16
"""Files on their way at a time: most are small, and there are some of each range, one after the other for hours of 10 TB."""
FILES_PER_WINDOW = 256
"""Files of which those that are there are taken before the first that is missing is waited for."""
LOG_INTERVAL_SECONDS = 60.0


class ResultAlreadyPublished(Exception):
    """The first pod has all that it needed, and what the pods gave each other is deleted, or soon will be."""


class Pods:
    """One pod, which has all units and all files itself."""

    rank, count = 0, 1

    def own(self, units: int) -> range:
        """The units of this pod, such as ranges, that are spread over all pods."""
        return range(self.rank, units, self.count)

    def unit_range(self, units: int, rank: int) -> tuple[int, int]:
        """First unit, and first that is no more, of those that a pod has where they should lie side by side."""
        return units * rank // self.count, units * (rank + 1) // self.count

    def is_published(self, path: Path) -> bool:
        """Whether a file was given, by this pod before it was started again too."""
        return False

    def publish(self, *paths: Path) -> None:
        """Let the other pods have files, in this order: one that says that others are there is given after them."""

    def publish_all(self, units: Iterable[Sequence[Path]]) -> None:
        """Let the other pods have the files of many units, of which those of one are given in their order."""

    def fetch(self, paths: Iterable[Path]) -> None:
        """Have files that some pods give: wait for them if need be."""


class MultiplePods(Pods):
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

    def _file_uri(self, path: Path) -> str:
        return f"{self._uri}/{path.relative_to(self._work).as_posix()}"

    def is_published(self, path: Path) -> bool:
        try:
            self._store.size(self._file_uri(path))
        except FileNotFoundError:
            return False
        return True

    def publish(self, *paths: Path) -> None:
        for path in paths:
            self._store.put_file(self._file_uri(path), path, parts_at_once=1)  # of so many files at once

    def publish_all(self, units: Iterable[Sequence[Path]]) -> None:
        waiting = iter(units)
        with ThreadPoolExecutor(CONCURRENT_FILES, thread_name_prefix="give") as threads:
            while window := [*islice(waiting, FILES_PER_WINDOW)]:
                for _ in threads.map(lambda paths: self.publish(*paths), window):
                    pass

    def fetch(self, paths: Iterable[Path]) -> None:
        """Raises ResultAlreadyPublished: there is nothing more to take."""
        waiting = iter(paths)
        with ThreadPoolExecutor(CONCURRENT_FILES, thread_name_prefix="take") as threads:
            while missing := [*islice(waiting, FILES_PER_WINDOW)]:
                while missing := [path for path in missing if not path.is_file()]:
                    self._wait_for(missing[0])
                    for _ in threads.map(self._fetch_if_published, missing):
                        pass

    def _fetch_if_published(self, path: Path) -> None:
        """Have a file here, if it was given already. One that is given anew just now is tried again."""
        with suppress(FileNotFoundError):
            stored = self._store.open(self._file_uri(path))
            with atomic_path(path) as part, part.open("wb") as out:
                for piece in stored.chunks():
                    out.write(piece)

    def _wait_for(self, path: Path) -> None:
        logged_at = time.monotonic()
        while not self.is_published(path):
            if self._is_over():
                raise ResultAlreadyPublished
            if time.monotonic() - logged_at > LOG_INTERVAL_SECONDS:
                logged_at = time.monotonic()
                log_line(f"waiting for {path.relative_to(self._work)} of another pod")
            time.sleep(self._poll_seconds)
