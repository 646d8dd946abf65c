"""Find and kill a command job's processes by the job's id in their environment.

For a job on several nodes, only those of one node are killed: two nodes may share a machine, and see each other's processes.
A process group is not enough: torchrun starts its workers in their own sessions, and they outlive it if it is killed.
"""

import os
import signal
import time
from pathlib import Path

JOB_ID_VARIABLE = "HANZO_ML_JOB_ID"
"""Environment variable with the job's id; inherited by children, and unique to the job."""
NODE_RANK_VARIABLE = "PET_NODE_RANK"
"""Environment variable that distinguishes the nodes of a job, named as in torchrun; inherited too."""
PROC_FOLDER = Path("/proc")
POLL_SECONDS = 0.02
KILL_TIMEOUT_SECONDS = 30.0
"""How long to wait for processes to end. One in a system call that does not return, as on a network folder whose server is
down, never ends: it no longer executes its own code and is not waited for.
"""


def kill_job_processes(job_id: str, node: str | None = None) -> int:
    """Kill all processes of a job, or of one of its nodes; return their number.

    Repeats SIGKILL until there are none left, for at most `KILL_TIMEOUT_SECONDS`.
    """
    ended: set[int] = set()
    until = time.monotonic() + KILL_TIMEOUT_SECONDS
    while found := find_job_processes(job_id, node):
        for process_id in found:
            kill_process(process_id, job_id, node)
        ended |= set(found)
        if time.monotonic() >= until:  # checked after a first pass: on a busy machine a scan of /proc takes long
            break
        time.sleep(POLL_SECONDS)
    return len(ended)


def find_job_processes(job_id: str, node: str | None = None) -> list[int]:
    """Return the ids of a job's processes, or of those on one node.

    This process is excluded.
    """
    ids = (int(entry.name) for entry in PROC_FOLDER.iterdir() if entry.name.isdigit())
    return [process_id for process_id in ids if process_id != os.getpid() and belongs_to_job(process_id, job_id, node)]


def belongs_to_job(process_id: int, job_id: str, node: str | None = None) -> bool:
    try:
        variables = (PROC_FOLDER / str(process_id) / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return False
    is_same_job = f"{JOB_ID_VARIABLE}={job_id}".encode() in variables
    return is_same_job and (node is None or f"{NODE_RANK_VARIABLE}={node}".encode() in variables)


def kill_process(process_id: int, job_id: str, node: str | None = None) -> None:
    """Kill a process, but not another one that has reused its id."""
    try:
        handle = os.pidfd_open(process_id)
    except OSError:
        return
    try:
        if belongs_to_job(process_id, job_id, node):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)
