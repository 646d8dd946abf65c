"""Processes that share the units of a stage.

They are told over a pipe of their own, which ends with whoever started them: a pool of `concurrent.futures` whose owner
is killed leaves its processes waiting for ever.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

Unit = Callable[..., Any]
END_SECONDS = 30.0
"""What a process has for its end, of which nothing is wanted any more."""


def work(pipe: Connection) -> None:
    """Do what comes over the pipe, one call at a time, until it ends: of the unit that came last."""
    unit: Unit | None = None
    # Records are trees: looking for cycles among thousands of them again and again took a tenth of the time.
    gc.disable()
    while True:
        try:
            other, arguments = pipe.recv()
        except (EOFError, ConnectionError):
            return
        unit = other or unit
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
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if error is not None:
                process.terminate()
            process.join(END_SECONDS)
            if process.is_alive():  # it hangs while it ends, and nobody waits for anything of it
                process.kill()
                process.join()

    def run(self, unit: Unit, calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """What `unit` answers to each call, as they are done. Raises what a unit raised.

        The unit goes to each process once, with all that is bound to it: what is the same for all calls may be large.
        """
        waiting = iter(calls)
        busy = [pipe for pipe in self._pipes if give(pipe, waiting, unit)]
        while busy:
            for pipe in wait(busy):
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionError):
                    raise RuntimeError("a worker was killed, perhaps for its memory: start it again, it goes on") from None
                if isinstance(answer, Exception):
                    raise answer
                if not give(pipe, waiting):
                    busy.remove(pipe)
                yield answer


def give(pipe: Connection, waiting: Iterator[tuple[Any, ...]], unit: Unit | None = None) -> bool:
    """Send the next call over a pipe, of another unit than the call before if need be; False when there is none."""
    arguments = next(waiting, None)
    if arguments is None:
        return False
    pipe.send((unit, arguments))
    return True
