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
"""A shell adds this to the number of the signal that ended its child."""
WORKER_KILLED = re.compile(r"\bSignal 9 \(SIGKILL\) received by PID \d+")
"""torchrun's message about a worker that was killed, for any reason; torchrun itself exits with 1, as after any error.

For other signals the sender is unknown: the workers that are left after one has failed abort, or are ended.
"""
ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?\n\s*rank\s*: (\d+)", re.DOTALL)
ERROR_LINE = re.compile(r"^(\[rank\d+\]: *)?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(: .*\S)?$")
"""The last line of a Python traceback."""


class OutputTail:
    """Forwards what arrives through a pipe, and keeps the end of it."""

    def __init__(self) -> None:
        self._buffer = b""

    @property
    def text(self) -> str:
        return self._buffer.decode(errors="replace")

    def forward(self, source: int, target: int) -> None:
        """Forward until no process has the pipe open for writing.

        A log that fails does not block the command.
        """
        while data := os.read(source, 1 << 16):
            self._buffer = (self._buffer + data)[-MAX_KEPT_BYTES:]
            try:
                while data:
                    data = data[os.write(target, data) :]
            except OSError:
                pass


def killing_signal(code: int, errors: str) -> str | None:
    """Return the signal that ended a command, or None.

    It may have ended one of torchrun's workers or a shell's child instead of the command itself.
    """
    if code == 0:
        return None
    if WORKER_KILLED.search(errors):
        return signal.SIGKILL.name
    number = -code if code < 0 else code - SIGNAL_EXIT_OFFSET
    return signal.Signals(number).name if number in set(signal.Signals) else None


def failure_summary(errors: str) -> str:
    """Return a command's error as one line.

    Its last error, else the last line with text. For torchrun's workers it is the error of the first that failed: the others
    fail because of it.
    """
    lines = [line.strip() for line in errors.splitlines()]
    found = [line for line in lines if ERROR_LINE.match(line)]
    if root := ROOT_CAUSE.search(errors):
        found = [line for line in found if line.startswith(f"[rank{root[1]}]")] or found
    candidates = found or [line for line in lines if any(letter.isalnum() for letter in line)]
    return candidates[-1][:500] if candidates else ""


PIPE_TIMEOUT_SECONDS = 10.0
"""How long to wait for the end of the output: a process that escaped from the group may hold the pipe open for ever."""


class CommandProcess:
    """The command as a process in its own group, which ends when this process ends.

    SIGTERM is forwarded to it.
    """

    def __init__(self, arguments: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> None:
        self.stop_requested = False
        self._arguments, self._folder, self._env = arguments, folder, env
        self._process: Popen[bytes] | None = None
        self._tail = OutputTail()
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        """Run the command and return its exit code: negative if a signal ended it."""
        if self.stop_requested:
            raise Preempted("asked to stop before the command began")
        self._process = process = start_process(self._arguments, self._folder, self._env)
        if self.stop_requested:  # requested during the start
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
            )  # including those that still hold the pipe open
            reader.join(PIPE_TIMEOUT_SECONDS)

    @property
    def stderr_tail(self) -> str:
        """The end of what the command wrote to stderr."""
        return self._tail.text

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def start_process(arguments: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> Popen[bytes]:
    """Start the command; its stdout goes directly to the log.

    If this process is killed, the kernel ends the command.
    """
    setpriv = shutil.which("setpriv")  # if an image has no setpriv, its container ends with this process
    die_with_parent = (setpriv, "--pdeathsig=KILL", "--") if setpriv else ()
    return Popen([*die_with_parent, *arguments], cwd=folder, env=env, stdin=DEVNULL, stderr=PIPE, start_new_session=True)
