"""The processes of a command job, wherever they went: each carries the job's id in its environment, and is ended by that.

Of a job on several nodes those of one node are ended: two nodes may be on one machine, and see each other's processes.

A process group is not enough: torchrun starts its workers in sessions of their own, and they outlive it when it is killed.
"""

import os
import signal
import time
from pathlib import Path

JOB_ID_VARIABLE = "HANZO_ML_JOB_ID"
"""The variable; children inherit it, and nobody else has it."""
NODE_RANK_VARIABLE = "PET_NODE_RANK"
"""The variable that tells the nodes of a job apart, as torchrun has it; children inherit it too."""
PROC_FOLDER = Path("/proc")
POLL_SECONDS = 0.02
KILL_TIMEOUT_SECONDS = 30.0
"""That a process may take to end. One in a call of the kernel that does not return, as of a network folder whose server is
away, takes for ever: it runs nothing of its own any more, and is not waited for.
"""


def kill_job_processes(job_id: str, node: str | None = None) -> int:
    """End all processes of a job, or those of one of its nodes, by SIGKILL, until there are none, or for
    `KILL_TIMEOUT_SECONDS`.

    Returns how many there were.
    """
    ended: set[int] = set()
    until = time.monotonic() + KILL_TIMEOUT_SECONDS
    while (found := find_job_processes(job_id, node)) and time.monotonic() < until:
        for process_id in found:
            kill_process(process_id, job_id, node)
        ended |= set(found)
        time.sleep(POLL_SECONDS)
    return len(ended)


def find_job_processes(job_id: str, node: str | None = None) -> list[int]:
    """The ids of a job's processes, or of those on one of its nodes, this one not among them."""
    ids = (int(entry.name) for entry in PROC_FOLDER.iterdir() if entry.name.isdigit())
    return [process_id for process_id in ids if process_id != os.getpid() and belongs_to_job(process_id, job_id, node)]


def belongs_to_job(process_id: int, job_id: str, node: str | None = None) -> bool:
    try:
        variables = (PROC_FOLDER / str(process_id) / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
    is_same_job = f"{JOB_ID_VARIABLE}={job_id}".encode() in variables
    return is_same_job and (node is None or f"{NODE_RANK_VARIABLE}={node}".encode() in variables)


def kill_process(process_id: int, job_id: str, node: str | None = None) -> None:
    """End one process, and not another that got its number meanwhile."""
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
