"""The program as a child process of the launcher: output, signals and descendants."""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from recipes.launch.log_segments import LogSpool

READ_BYTES = 1 << 16
DUMP_SECONDS = 1.0
"""Time between SIGUSR1, which dumps stacks, and SIGTERM."""
PIPE_TIMEOUT_SECONDS = 10.0
"""Wait for the last output at most this long: a process that outlives the program may keep its pipe open."""
PROC = Path("/proc")


class ChildProcess:
    """A running program. Signals go to the program, which forwards them to its ranks.

    SIGKILL goes to all descendants.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], spool: LogSpool) -> None:
        self.was_ended = False
        self.was_killed = False
        self._process = subprocess.Popen(
            arguments,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._output = threading.Thread(target=self._pass_output, args=(spool.write,), daemon=True)
        self._output.start()

    async def wait(self) -> int:
        """Wait for the program and return its exit code, negative if a signal ended it."""
        descriptor = os.pidfd_open(self._process.pid)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        code = self._process.wait()
        await asyncio.to_thread(self._output.join, PIPE_TIMEOUT_SECONDS)
        return code

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    def terminate(self) -> None:
        """Ask the program to save and stop."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)

    async def end(self, seconds: float) -> None:
        """End a program that cannot continue: dump stacks, then SIGTERM, then SIGKILL after `seconds`."""
        self.was_ended = True
        for process_id in self._all():
            if catches_signal(process_id, signal.SIGUSR1):
                send(process_id, signal.SIGUSR1)
        await asyncio.sleep(DUMP_SECONDS)
        self.terminate()
        await asyncio.sleep(max(0.0, seconds - DUMP_SECONDS))
        self.kill()

    def kill(self) -> None:
        if self.is_running:
            self.was_killed = True
            for process_id in reversed(self._all()):
                send(process_id, signal.SIGKILL)

    def _all(self) -> list[int]:
        return [self._process.pid, *descendants(self._process.pid)] if self.is_running else []

    def _pass_output(self, write: Callable[[bytes], None]) -> None:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while data := os.read(descriptor, READ_BYTES):
            write(data)


def descendants(process_id: int) -> list[int]:
    """Return all descendants of a process, parents before their children."""
    found: list[int] = []
    waiting = [process_id]
    while waiting:
        for children in (PROC / str(waiting.pop(0))).glob("task/*/children"):
            with suppress(OSError):
                ids = [int(word) for word in children.read_text(encoding="utf-8").split()]
                found += ids
                waiting += ids
    return found


def catches_signal(process_id: int, number: signal.Signals) -> bool:
    """Return whether a process handles a signal.

    SIGUSR1 kills processes without a handler, such as torchrun.
    """
    try:
        lines = (PROC / str(process_id) / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def send(process_id: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process_id, number)
