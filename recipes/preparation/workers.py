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

# Worker processes that share the units of a stage.
#
# Each has its own pipe, which closes when the parent dies: the processes of a pool of `concurrent.futures` wait forever if
# their parent is killed.

Unit = Callable[..., Any]
JOIN_TIMEOUT_SECONDS = 30.0
"""How long an idle process may take to exit."""


def run_worker(pipe: Connection) -> None:
    """Execute calls from the pipe until it closes.

    A call without a unit uses the previous one.
    """
    unit: Unit | None = None
    # Records are trees without cycles: repeated cyclic garbage collection took a tenth of the time.
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
        gc.collect(0)  # collects only what this unit created
        try:
            pipe.send(answer)
        except ConnectionError:
            return


class Workers:
    """A pool of `count` processes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> Self:
        # Not forked: a copy of this process would inherit the other pipes, and locks held by threads.
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
            if process.is_alive():  # it hangs during its exit, and has no more work
                process.kill()
                process.join()

    def run(self, unit: Unit, calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield the results of `unit` for each call, in order of completion.

        Raises errors of the unit. The unit with its bound arguments is sent once per process, since they may be large.
        """
        waiting = iter(calls)
        busy = [pipe for pipe in self._pipes if send_next_call(pipe, waiting, unit)]
        while busy:
            for pipe in wait(busy):
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionError):
                    raise RuntimeError("a worker was killed, perhaps for lack of memory: start again to resume") from None
                if isinstance(answer, Exception):
                    raise answer
                if not send_next_call(pipe, waiting):
                    busy.remove(pipe)
                yield answer


def send_next_call(pipe: Connection, waiting: Iterator[tuple[Any, ...]], unit: Unit | None = None) -> bool:
    """Send the next call, with `unit` if it changed; return False if there is none."""
    arguments = next(waiting, None)
    if arguments is None:
        return False
    pipe.send((unit, arguments))
    return True


# Pods that share a preparation: each processes its own units, and publishes results for the others in the object store.
#
# They share nothing else. Published files depend on the input alone, so a restarted pod, with or without its local files,
# finds what was published, does the rest, and may publish anything twice.

POLL_SECONDS = 1.0
CONCURRENT_FILES = 16
"""Number of concurrent transfers: most files are small, but sequential transfers would take hours for 10 TB."""
FILES_PER_WINDOW = 256
"""Number of files per window: those available are fetched before waiting for missing ones."""
LOG_INTERVAL_SECONDS = 60.0


class ResultAlreadyPublished(Exception):
    """The first pod has finished, and the exchanged files are deleted or will be soon."""


class Pods:
    """A single pod, which has all units and files itself."""

    rank, count = 0, 1

    def own(self, units: int) -> range:
        """Return this pod's units, strided over all pods."""
        return range(self.rank, units, self.count)

    def unit_range(self, units: int, rank: int) -> tuple[int, int]:
        """Return a pod's contiguous range of units: first and end (exclusive)."""
        return units * rank // self.count, units * (rank + 1) // self.count

    def is_published(self, path: Path) -> bool:
        """Return whether a file was published, possibly before a restart of this pod."""
        return False

    def publish(self, *paths: Path) -> None:
        """Publish files for other pods in this order.

        Markers must follow the files that they announce.
        """

    def publish_all(self, units: Iterable[Sequence[Path]]) -> None:
        """Publish the files of many units; those of one unit in their order."""

    def fetch(self, paths: Iterable[Path]) -> None:
        """Make files of other pods available locally, waiting if necessary."""


class MultiplePods(Pods):
    """One of several pods.

    Files are identified by their path below `work`, and stored below `uri`. `is_over` returns whether the job has its
    result: a pod that restarted just then waited for deleted files.
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
            # one part at a time, since many files are transferred at once
            self._store.put_file(self._file_uri(path), path, parts_at_once=1)

    def publish_all(self, units: Iterable[Sequence[Path]]) -> None:
        waiting = iter(units)
        with ThreadPoolExecutor(CONCURRENT_FILES, thread_name_prefix="give") as threads:
            while window := [*islice(waiting, FILES_PER_WINDOW)]:
                for _ in threads.map(lambda paths: self.publish(*paths), window):
                    pass

    def fetch(self, paths: Iterable[Path]) -> None:
        """Like `Pods.fetch`.

        Raises ResultAlreadyPublished: there is nothing to wait for.
        """
        waiting = iter(paths)
        with ThreadPoolExecutor(CONCURRENT_FILES, thread_name_prefix="take") as threads:
            while missing := [*islice(waiting, FILES_PER_WINDOW)]:
                while missing := [path for path in missing if not path.is_file()]:
                    self._wait_for(missing[0])
                    for _ in threads.map(self._fetch_if_published, missing):
                        pass

    def _fetch_if_published(self, path: Path) -> None:
        """Fetch a file if it is published; one that is being replaced is retried later."""
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
