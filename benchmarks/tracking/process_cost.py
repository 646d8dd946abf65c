"""What processes cost: their memory, and their processor time, which says the same on a machine that others use too."""

import os
import subprocess
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def list_session_processes(leader: int) -> list[int]:
    """A process that leads a session, and all in it."""
    listed = subprocess.run(["ps", "-o", "pid=", "-g", str(leader)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def with_children(parent: int) -> list[int]:
    return [parent, *map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())]


def memory(pids: list[int]) -> float:
    """Proportional set size of all, in MB."""
    return sum(_pss(pid) for pid in pids) * 1024 / 1_000_000


def processor_seconds(pids: list[int]) -> float:
    """What they have used since they began, with their children that ended."""
    return sum(_ticks(pid) for pid in pids) / TICKS


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name of the program, in parentheses, may hold spaces.
    return sum(map(int, stat.rpartition(")")[2].split()[11:15]))
