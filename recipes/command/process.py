"""Run the command as a process group, and explain how it ended."""

import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from types import FrameType

from recipes.job_processes import JOB_ID_VARIABLE, NODE_RANK_VARIABLE, kill_job_processes
from recipes.runner import Preempted

MAX_KEPT_BYTES = 64 << 10
SIGNAL_EXIT_OFFSET = 128
"""What a shell adds to the number of the signal that ended what it ran."""
WORKER_KILLED = re.compile(r"\bSignal 9 \(SIGKILL\) received by PID \d+")
"""torchrun's words on a worker that was killed, by whatever it was; torchrun itself then exits with 1, as after any error.

Of other signals it is not known who sent them: the workers that go on after one has failed abort, or are ended.
"""
ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?\n\s*rank\s*: (\d+)", re.DOTALL)
ERROR_LINE = re.compile(r"^(\[rank\d+\]: *)?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(: .*\S)?$")
"""The last line of a Python traceback."""


class OutputTail:
    """Hands on what comes through a pipe as it comes, and keeps the end."""

    def __init__(self) -> None:
        self._buffer = b""

    @property
    def text(self) -> str:
        return self._buffer.decode(errors="replace")

    def forward(self, source: int, target: int) -> None:
        """Until nobody can write to the pipe any more. A log that takes nothing more does not hold up the command."""
        while data := os.read(source, 1 << 16):
            self._buffer = (self._buffer + data)[-MAX_KEPT_BYTES:]
            try:
                while data:
                    data = data[os.write(target, data) :]
            except OSError:
                pass


def killing_signal(code: int, errors: str) -> str | None:
    """The signal that ended a command, one of torchrun's workers, or what a shell ran for it; None where none did."""
    if code == 0:
        return None
    if WORKER_KILLED.search(errors):
        return signal.SIGKILL.name
    number = -code if code < 0 else code - SIGNAL_EXIT_OFFSET
    return signal.Signals(number).name if number in set(signal.Signals) else None


def failure_summary(errors: str) -> str:
    """Why a command failed, as one line: its last error, else the last line that says anything.

    Of torchrun's workers it is that of the first to fail: the others fail for want of it.
    """
    lines = [line.strip() for line in errors.splitlines()]
    found = [line for line in lines if ERROR_LINE.match(line)]
    if root := ROOT_CAUSE.search(errors):
        found = [line for line in found if line.startswith(f"[rank{root[1]}]")] or found
    candidates = found or [line for line in lines if any(letter.isalnum() for letter in line)]
    return candidates[-1][:500] if candidates else ""


PIPE_TIMEOUT_SECONDS = 10.0
"""How long the last words of a command are waited for: who hides from us may hold its pipe for ever."""


class CommandProcess:
    """The command as a process in a group of its own, which dies with this one. SIGTERM is handed on to it."""

    def __init__(self, arguments: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> None:
        self.stop_requested = False
        self._arguments, self._folder, self._env = arguments, folder, env
        self._process: Popen[bytes] | None = None
        self._tail = OutputTail()
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        """Its exit code, negative where a signal ended it."""
        if self.stop_requested:
            raise Preempted("asked to stop before the command began")
        self._process = process = start_process(self._arguments, self._folder, self._env)
        if self.stop_requested:  # while it was started
            self._send(signal.SIGTERM)
        assert process.stderr is not None
        reader = threading.Thread(
            target=self._tail.forward, args=(process.stderr.fileno(), sys.stderr.fileno()), daemon=True
        )
        reader.start()
        try:
            return process.wait()
        finally:
            kill_job_processes(
                self._env[JOB_ID_VARIABLE], self._env.get(NODE_RANK_VARIABLE)
            )  # whoever still writes to the pipe, too
            reader.join(PIPE_TIMEOUT_SECONDS)

    @property
    def stderr_tail(self) -> str:
        """The end of what it wrote to stderr."""
        return self._tail.text

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def start_process(arguments: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> Popen[bytes]:
    """The command, its stdout the log itself. Should this process be killed, the kernel ends it."""
    setpriv = shutil.which("setpriv")  # where an image has none, its container ends with this process
    die_with_parent = (setpriv, "--pdeathsig=KILL", "--") if setpriv else ()
    return Popen([*die_with_parent, *arguments], cwd=folder, env=env, stdin=DEVNULL, stderr=PIPE, start_new_session=True)
