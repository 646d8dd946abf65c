"""Memory and processor time of processes; both are comparable on a shared machine."""

import os
import subprocess
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def list_session_processes(leader: int) -> list[int]:
    """Return the session leader and all processes of its session."""
    listed = subprocess.run(["ps", "-o", "pid=", "-g", str(leader)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def with_children(parent: int) -> list[int]:
    return [parent, *map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())]


def memory(pids: list[int]) -> float:
    """Return the proportional set size of all processes in MB."""
    return sum(_pss(pid) for pid in pids) * 1024 / 1_000_000


def processor_seconds(pids: list[int]) -> float:
    """Return the processor time since their start, including ended children."""
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
    # The program's name, in parentheses, may contain spaces.
    return sum(map(int, stat.rpartition(")")[2].split()[11:15]))
