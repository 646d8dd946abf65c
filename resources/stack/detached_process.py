"""Start, find and stop processes that outlive their starter."""

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
from contextlib import contextmanager, suppress
from pathlib import Path

from recipes.storage.checksums import write_atomically

# Processes that outlive whoever started them, and can be found again.
#
# Whether one runs is a question to its lock file: the process inherits the lock from its starter and holds it until its
# last breath. So there is no moment at which a starter could die between starting and remembering, and never two of the
# same.

LOG_FILE = "log.txt"
LOCK_FILE = "lock"
PID_FILE = "pid.json"
STOP_MARKER = "asked_to_stop"
"""As old as the SIGTERM that the process got from somebody who did not wait for it."""
FLOCK_FORMAT = "hhqqi"
"""struct flock: type, whence, start, length, process id."""
WRITE_PID_AND_EXEC = 'echo $$ > "$0" && exec "$@"'
"""The process itself says who it is, before it does anything: a starter can be killed before it would have said so. One that
could not, on a full disk, would never be ended: it does nothing.
"""


@contextmanager
def lock_folder(folder: Path) -> Iterator[int | None]:
    """The lock of a folder as a file descriptor while the block runs, or None where a process holds it.

    It belongs to the open file, not to the process (Linux' "open file description lock"), so a child that inherits the
    descriptor holds it on.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(FLOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock. Looks without taking it: a starter at this moment must not hear "taken"."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)  # also where the disk has become one that is read alone
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        question = struct.pack(FLOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, question)
    finally:
        os.close(descriptor)
    return bool(struct.unpack_from(FLOCK_FORMAT, answer)[0] != fcntl.F_UNLCK)


def start_detached(
    command: Sequence[str],
    folder: Path,
    descriptor: int,
    *,
    cwd: Path | None,
    env: Mapping[str, str],
    inherited_descriptors: Sequence[int] = (),
    inherited_env: Mapping[str, str] | None = None,
) -> None:
    """Start a command in a session of its own; it inherits the lock and those `inherited_descriptors`. The folder's log has
    its output. `env` goes before `inherited_env`, which is this process's own environment when unset.

    Returns when the process has said who it is. Raises OSError where it could not.
    """
    (folder / PID_FILE).unlink(missing_ok=True)
    (folder / STOP_MARKER).unlink(missing_ok=True)
    with (folder / LOG_FILE).open("ab") as log:
        process = subprocess.Popen(
            ["sh", "-c", WRITE_PID_AND_EXEC, str(folder / PID_FILE), *command],
            cwd=cwd,
            env={**(os.environ if inherited_env is None else inherited_env), **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[descriptor, *inherited_descriptors],
        )
    while process.poll() is None and not read_pid(folder):
        time.sleep(0.001)
    if (process.returncode or 0) > 0 and read_pid(folder) is None:  # it was not killed
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / PID_FILE))


def read_pid(folder: Path) -> int | None:
    """The process id, once the process has written it whole."""
    try:
        text = (folder / PID_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return int(text) if text.endswith("\n") else None


def send_signal(folder: Path, number: signal.Signals) -> bool:
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


def stop_process(folder: Path, grace_seconds: float, kill_seconds: float = math.inf) -> bool:
    """SIGTERM, and SIGKILL when the grace is over. Returns whether the process is gone, as `kill_process` does."""
    stop_request = False
    end = time.monotonic() + grace_seconds
    while is_running(folder):
        stop_request = stop_request or send_signal(folder, signal.SIGTERM)
        time.sleep(0.1)
        if time.monotonic() > end:
            return kill_process(folder, kill_seconds)
    return True


def kill_process(folder: Path, seconds: float) -> bool:
    """SIGKILL. Returns whether the process is gone, or False where it is not after so many seconds: the kernel does not end
    one that waits in it for a disk or a device that does not answer.
    """
    end = time.monotonic() + seconds
    while is_running(folder):
        send_signal(folder, signal.SIGKILL)
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def request_stop(folder: Path, grace_seconds: float) -> None:
    """`stop_process` for those who cannot wait: SIGTERM the first time, SIGKILL once they ask when the grace is over."""
    stop_request = folder / STOP_MARKER
    if not stop_request.exists():
        if send_signal(folder, signal.SIGTERM):
            stop_request.touch()
    elif time.time() - stop_request.stat().st_mtime > grace_seconds:
        send_signal(folder, signal.SIGKILL)


def write_json_atomic(path: Path, document: object) -> None:
    write_atomic(path, json.dumps(document))


def write_atomic(path: Path, text: str) -> None:
    """Replace a file atomically and durably.

    A cancel once left half of a state file, and a full disk an empty one. Without the fsync a power failure can leave a name
    without content. Two supervisors may write the same file at once: each has a temporary file of its own.
    """
    with write_atomically(path) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


# What a run worker that was killed has left: Dagster starts `tail -F`, and another process that ends it once the worker
# is gone. Where that was killed too, as when memory runs out, nobody did, and it outlived `hanzo-ml down`.

PROC = Path("/proc")
WORKERS_VARIABLE = "DAGSTER_RUN_WORKERS"
"""The variable with the folder of all workers, from which dagster.yaml has it; each worker inherits it."""


def kill_orphans(folder: Path) -> None:
    """End, by SIGKILL, the group of a worker that ran in a folder and is gone. What it started in sessions of their own goes
    on, as a training does.

    No other process gets the number of a group that is there. Once it is gone, another group may: it has no such variable.
    """
    group = read_pid(folder)
    if group is None or is_running(folder) or not group_exists(group):
        return
    mark = f"{WORKERS_VARIABLE}={folder.parent}".encode()
    for process_id in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()):
        with suppress(OSError):  # it has ended, or is another user's
            variables = (PROC / str(process_id) / "environ").read_bytes().split(b"\0")
            if os.getpgid(process_id) == group and mark in variables:
                os.kill(process_id, signal.SIGKILL)


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True
