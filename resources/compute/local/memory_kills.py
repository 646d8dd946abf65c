"""The kernel's count of processes that it killed because memory ran out.

It counts the whole machine, also kills by a cgroup's limit. So it is evidence only about a process that was killed without
writing an exit reason.
"""

from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def memory_kills(vmstat: Path = VMSTAT) -> int:
    """Number of out-of-memory kills since boot; 0 where the kernel does not report it (before Linux 4.13)."""
    counts = dict(line.split() for line in vmstat.read_text().splitlines()) if vmstat.is_file() else {}
    return int(counts.get("oom_kill", 0))
