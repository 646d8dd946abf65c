"""Serve one listening socket with several processes.

They are forked once everything is loaded, to share its memory.

A worker that dies is replaced. Workers end with their parent: on its signal, or when it dies.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

log = logging.getLogger(__name__)

RESTART_PAUSE_SECONDS = 1.0
"""Pause before a dead worker is replaced: one that fails at its start must not be forked in a busy loop."""


def run_workers(count: int, serve: Callable[[int], None]) -> None:
    """Run `serve(0)` to `serve(count - 1)` in a process each, until SIGTERM or SIGINT.

    The signal is passed on to the workers. No other thread may run yet: a fork copies its locks, but not the thread.
    """
    read_end, write_end = os.pipe()
    workers: dict[int, int] = {}
    ending = False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal ending
        ending = True
        for pid in workers:
            os.kill(pid, signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    for index in range(count):
        workers[_fork_worker(index, serve, read_end, write_end)] = index
    while workers:
        pid, status = os.wait()
        index = workers.pop(pid)
        if not ending:
            log.error("worker %d (process %d) ended with status %d and is replaced", index, pid, status)
            time.sleep(RESTART_PAUSE_SECONDS)
        if not ending:
            workers[_fork_worker(index, serve, read_end, write_end)] = index
            if ending:  # the signal arrived before the new worker was in `workers`
                end(signal.SIGTERM, None)
    os.close(read_end)
    os.close(write_end)


def _fork_worker(index: int, serve: Callable[[int], None], read_end: int, write_end: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.close(write_end)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=_exit_without_parent, args=(read_end,), name="parent", daemon=True).start()
        serve(index)
        status = 0
    except BaseException:
        log.exception("worker %d failed", index)
    finally:
        # Skip the exit handlers and open context managers inherited from the parent: they are not this process's to end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _exit_without_parent(read_end: int) -> None:
    """End this process with its parent, when the parent's end of the pipe closes."""
    os.read(read_end, 1)
    os.kill(os.getpid(), signal.SIGTERM)
