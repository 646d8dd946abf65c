"""The command as a process: how it is started, asked to stop, and waited for."""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from types import FrameType

from recipes.command.end import Tail
from recipes.job_processes import MARK, NODE, end_processes
from recipes.runner import Preempted

PIPE_SECONDS = 10.0
"""How long the last words of a command are waited for: who hides from us may hold its pipe for ever."""


class Command:
    """The command as a process in a group of its own, which dies with this one. SIGTERM is handed on to it."""

    def __init__(self, words: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> None:
        self.asked_to_stop = False
        self._words, self._folder, self._env = words, folder, env
        self._process: Popen[bytes] | None = None
        self._tail = Tail()
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        """Its exit code, negative where a signal ended it."""
        if self.asked_to_stop:
            raise Preempted("asked to stop before the command began")
        self._process = process = start(self._words, self._folder, self._env)
        if self.asked_to_stop:  # while it was started
            self._send(signal.SIGTERM)
        assert process.stderr is not None
        reader = threading.Thread(target=self._tail.follow, args=(process.stderr.fileno(), sys.stderr.fileno()), daemon=True)
        reader.start()
        try:
            return process.wait()
        finally:
            end_processes(self._env[MARK], self._env.get(NODE))  # whoever still writes to the pipe, too
            reader.join(PIPE_SECONDS)

    @property
    def errors(self) -> str:
        """The end of what it wrote to stderr."""
        return self._tail.text

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_stop = True
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def start(words: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> Popen[bytes]:
    """The command, its stdout the log itself. Should this process be killed, the kernel ends it."""
    setpriv = shutil.which("setpriv")  # where an image has none, its container ends with this process
    leave_with_parent = (setpriv, "--pdeathsig=KILL", "--") if setpriv else ()
    return Popen([*leave_with_parent, *words], cwd=folder, env=env, stdin=DEVNULL, stderr=PIPE, start_new_session=True)
