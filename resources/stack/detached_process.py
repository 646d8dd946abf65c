"""What a run worker that was killed has left: Dagster starts `tail -F`, and another process that ends it once the worker is
gone. Where that was killed too, as when memory runs out, nobody did, and it outlived `hanzo-ml down`.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

from resources.detached import is_running, read_pid

PROCESSES = Path("/proc")
WORKERS = "DAGSTER_RUN_WORKERS"
"""The variable with the folder of all workers, from which dagster.yaml has it; each worker inherits it."""


def end_orphans(folder: Path) -> None:
    """End, by SIGKILL, the group of a worker that ran in a folder and is gone. What it started in sessions of their own goes
    on, as a training does.

    No other process gets the number of a group that is there. Once it is gone, another group may: it has no such variable.
    """
    group = read_pid(folder)
    if group is None or is_running(folder) or not is_there(group):
        return
    mark = f"{WORKERS}={folder.parent}".encode()
    for process_id in (int(entry.name) for entry in PROCESSES.iterdir() if entry.name.isdigit()):
        with suppress(OSError):  # it has ended, or is another user's
            variables = (PROCESSES / str(process_id) / "environ").read_bytes().split(b"\0")
            if os.getpgid(process_id) == group and mark in variables:
                os.kill(process_id, signal.SIGKILL)


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True
