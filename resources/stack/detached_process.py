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

# A lock file shows whether a process runs: the process inherits the lock from its starter and holds it until it ends. So a
# starter that dies at any moment cannot lose track of a started process, and there are never two of the same.

LOG_FILE = "log.txt"
LOCK_FILE = "lock"
PID_FILE = "pid.json"
STOP_MARKER = "asked_to_stop"
"""File whose modification time is that of a SIGTERM sent without waiting."""
FLOCK_FORMAT = "hhqqi"
"""struct flock: type, whence, start, length, process id."""
WRITE_PID_AND_EXEC = 'echo $$ > "$0" && exec "$@"'
"""The process writes its own PID before anything else, because its starter may be killed before it could. If that fails, as
on a full disk, the process exits: without a PID it could never be stopped.
"""


@contextmanager
def lock_folder(folder: Path) -> Iterator[int | None]:
    """Lock a folder during the block; yield the file descriptor, None if locked.

    The lock belongs to the open file, not to the process (Linux' "open file description lock"), so a child that inherits the
    descriptor keeps holding it.
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
    """Return whether a process holds the lock.

    Test the lock without acquiring it, which could make a concurrent starter fail.
    """
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)  # works on a file system that has become read-only, too
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
    """Start a command in its own session, with output to the folder's log.

    It inherits the lock and the `inherited_descriptors`. `env` overrides `inherited_env`, which defaults to this process's
    environment. Returns once the process has written its PID.

    Raises:
        OSError: the process could not write its PID.
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
    """Return the process id once it is completely written."""
    try:
        text = (folder / PID_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return int(text) if text.endswith("\n") else None


def send_signal(folder: Path, number: signal.Signals) -> bool:
    """Send a signal to a running process and its children; return whether it was sent."""
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
    """Send SIGTERM, then SIGKILL after the grace period.

    Return whether the process is gone, like `kill_process`.
    """
    stop_request = False
    end = time.monotonic() + grace_seconds
    while is_running(folder):
        stop_request = stop_request or send_signal(folder, signal.SIGTERM)
        time.sleep(0.1)
        if time.monotonic() > end:
            return kill_process(folder, kill_seconds)
    return True


def kill_process(folder: Path, seconds: float) -> bool:
    """Send SIGKILL; return whether the process is gone within so many seconds.

    The kernel does not end a process that waits uninterruptibly for an unresponsive disk or device.
    """
    end = time.monotonic() + seconds
    while is_running(folder):
        send_signal(folder, signal.SIGKILL)
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def request_stop(folder: Path, grace_seconds: float) -> None:
    """Stop a process without waiting.

    Send SIGTERM at the first call, SIGKILL at a call after the grace period.
    """
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
    without content. Two supervisors may write the same file concurrently: each has its own temporary file.
    """
    with write_atomically(path) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


# Processes left by a killed run worker: Dagster starts `tail -F`, and a watcher that ends it once the worker is gone. If the
# watcher was killed too, as when memory runs out, `tail` outlived `hanzo-ml down`.

PROC = Path("/proc")
WORKERS_VARIABLE = "DAGSTER_RUN_WORKERS"
"""Variable with the folder of all workers, referenced by dagster.yaml; each worker inherits it."""


def kill_orphans(folder: Path) -> None:
    """Kill the remaining process group of a worker that has ended.

    Processes that it started in their own sessions, such as a training, continue. The group's number may be reused once the
    group is gone; the variable distinguishes the worker's processes from such a group.
    """
    group = read_pid(folder)
    if group is None or is_running(folder) or not group_exists(group):
        return
    mark = f"{WORKERS_VARIABLE}={folder.parent}".encode()
    for process_id in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()):
        with suppress(OSError):  # it has ended, or belongs to another user
            variables = (PROC / str(process_id) / "environ").read_bytes().split(b"\0")
            if os.getpgid(process_id) == group and mark in variables:
                os.kill(process_id, signal.SIGKILL)


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True
