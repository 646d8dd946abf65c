"""Processes that outlive whoever started them, and can be found again.

Whether one runs is a question to its lock file: the process inherits the lock from its starter and holds it until its last
breath. So there is no moment at which a starter could die between starting and remembering, and never two of the same.
"""

import errno
import fcntl
import json
import math
import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

LOG = "log.txt"
PID = "pid.json"
ASKED = "asked_to_stop"
"""As old as the SIGTERM that the process got from somebody who did not wait for it."""
FLOCK = "hhqqi"
"""struct flock: type, whence, start, length, process id."""
WRITE_OWN_PID = 'echo $$ > "$0" && exec "$@"'
"""The process itself says who it is, before it does anything: a starter can be killed before it would have said so. One that
could not, on a full disk, would never be ended: it does nothing.
"""


@contextmanager
def lock(folder: Path) -> Iterator[int | None]:
    """The lock of a folder as a file descriptor while the block runs, or None where a process holds it.

    It belongs to the open file, not to the process (Linux' "open file description lock"), so a child that inherits the
    descriptor holds it on.
    """
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock. Looks without taking it: a starter at this moment must not hear "taken"."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY)  # also where the disk has become one that is read alone
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        question = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, question)
    finally:
        os.close(descriptor)
    return bool(struct.unpack_from(FLOCK, answer)[0] != fcntl.F_UNLCK)


def start(
    command: Sequence[str],
    folder: Path,
    descriptor: int,
    *,
    cwd: Path | None,
    env: Mapping[str, str],
    besides: Sequence[int] = (),
) -> None:
    """Start a command in a session of its own; it inherits the lock and those `besides`. The folder's log has its output.

    Returns when the process has said who it is. Raises OSError where it could not.
    """
    (folder / PID).unlink(missing_ok=True)
    (folder / ASKED).unlink(missing_ok=True)
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            ["sh", "-c", WRITE_OWN_PID, str(folder / PID), *command],
            cwd=cwd,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[descriptor, *besides],
        )
    while process.poll() is None and not read_pid(folder):
        time.sleep(0.001)
    if (process.returncode or 0) > 0 and read_pid(folder) is None:  # it was not killed
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / PID))


def read_pid(folder: Path) -> int | None:
    """The process id, once the process has written it whole."""
    try:
        text = (folder / PID).read_text()
    except FileNotFoundError:
        return None
    return int(text) if text.endswith("\n") else None


def send(folder: Path, number: signal.Signals) -> bool:
    """Send a signal to the process and its children, while it holds its lock. True when it was sent."""
    if not is_running(folder):
        return False
    process_id = read_pid(folder)
    if process_id is None:
        return False
    try:
        os.killpg(process_id, number)
    except ProcessLookupError:
        return False
    return True


def stop(folder: Path, grace_seconds: float, kill_seconds: float = math.inf) -> bool:
    """SIGTERM, and SIGKILL when the grace is over. Returns whether the process is gone, as `kill` does."""
    asked = False
    end = time.monotonic() + grace_seconds
    while is_running(folder):
        asked = asked or send(folder, signal.SIGTERM)
        time.sleep(0.1)
        if time.monotonic() > end:
            return kill(folder, kill_seconds)
    return True


def kill(folder: Path, seconds: float) -> bool:
    """SIGKILL. Returns whether the process is gone, or False where it is not after so many seconds: the kernel does not end
    one that waits in it for a disk or a device that does not answer.
    """
    end = time.monotonic() + seconds
    while is_running(folder):
        send(folder, signal.SIGKILL)
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def ask_to_stop(folder: Path, grace_seconds: float) -> None:
    """`stop` for those who cannot wait: SIGTERM the first time, SIGKILL once they ask when the grace is over."""
    asked = folder / ASKED
    if not asked.exists():
        if send(folder, signal.SIGTERM):
            asked.touch()
    elif time.time() - asked.stat().st_mtime > grace_seconds:
        send(folder, signal.SIGKILL)


def write_json(path: Path, document: object) -> None:
    write_whole(path, json.dumps(document))


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: a cancel once cut a state file in half, a full disk emptied one, and a loss of power
    leaves a name without what it names, unless that is on the disk before.
    """
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
