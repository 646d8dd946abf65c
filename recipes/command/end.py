"""How a command ended, from its exit code and the end of what it wrote to stderr."""

import os
import re
import signal

KEPT_BYTES = 64 << 10
BY_SIGNAL = 128
"""What a shell adds to the number of the signal that ended what it ran."""
WORKER_KILLED = re.compile(r"\bSignal 9 \(SIGKILL\) received by PID \d+")
"""torchrun's words on a worker that was killed, by whatever it was; torchrun itself then exits with 1, as after any error.

Of other signals it is not known who sent them: the workers that go on after one has failed abort, or are ended.
"""
ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?\n\s*rank\s*: (\d+)", re.DOTALL)
ERROR = re.compile(r"^(\[rank\d+\]: *)?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(: .*\S)?$")
"""The last line of a Python traceback."""


class Tail:
    """Hands on what comes through a pipe as it comes, and keeps the end."""

    def __init__(self) -> None:
        self._kept = b""

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")

    def follow(self, source: int, target: int) -> None:
        """Until nobody can write to the pipe any more. A log that takes nothing more does not hold up the command."""
        while data := os.read(source, 1 << 16):
            self._kept = (self._kept + data)[-KEPT_BYTES:]
            try:
                while data:
                    data = data[os.write(target, data) :]
            except OSError:
                pass


def killed_by(code: int, errors: str) -> str | None:
    """The signal that ended a command, one of torchrun's workers, or what a shell ran for it; None where none did."""
    if code == 0:
        return None
    if WORKER_KILLED.search(errors):
        return signal.SIGKILL.name
    number = -code if code < 0 else code - BY_SIGNAL
    return signal.Signals(number).name if number in set(signal.Signals) else None


def last_words(errors: str) -> str:
    """Why a command failed, as one line: its last error, else the last line that says anything.

    Of torchrun's workers it is that of the first to fail: the others fail for want of it.
    """
    lines = [line.strip() for line in errors.splitlines()]
    found = [line for line in lines if ERROR.match(line)]
    if root := ROOT_CAUSE.search(errors):
        found = [line for line in found if line.startswith(f"[rank{root[1]}]")] or found
    said = found or [line for line in lines if any(letter.isalnum() for letter in line)]
    return said[-1][:500] if said else ""
