"""Processes that outlive their starter, each with a log and a pid file."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ENDS_WITHIN = 20.0


class NotReady(Exception):
    """A timeout; the message has the end of a log that may explain it."""


def start(
    name: str,
    command: Sequence[str | Path],
    folder: Path,
    *,
    user: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> int:
    """Start `command` with the log FOLDER/NAME.log, and write its id to FOLDER/NAME.pid."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
            user=user,
            env={**os.environ, **(variables or {})},
        )
    (folder / f"{name}.pid").write_text(str(process.pid))
    return process.pid


def pid(name: str, folder: Path) -> int | None:
    """Return the id of a started process, if it is running."""
    path = folder / f"{name}.pid"
    found = int(path.read_text()) if path.exists() else None
    return found if found is not None and is_running(found) else None


def is_running(pid: int) -> bool:
    """Whether any thread of a process is more than a zombie.

    The first one may be a zombie already while others still hold the ports.
    """
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if thread.read_text().rpartition(")")[2].split()[0] not in "ZX":
                return True
    return False


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill(pids: Iterable[int]) -> None:
    """SIGKILL processes, and wait until they have ended."""
    pids = list(pids)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    wait_until(lambda: not any(map(is_running, pids)), ENDS_WITHIN, lambda: f"processes {pids} do not end")
    for pid in pids:
        reap(pid)


def reap(pid: int) -> None:
    """Reap our own child; others have other parents."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def wait_until(condition: Callable[[], bool], seconds: float, problem: Callable[[], str], *, pause: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise NotReady(problem())
        time.sleep(pause)


def tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else f"no log {log}"
