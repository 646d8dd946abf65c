"""How often the kernel ended a process for want of memory: its own count, which everybody may read.

It counts all of the machine, also those that a cgroup's limit ended, so that it is evidence about a process that was killed
without a word, and about no other.
"""

from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def memory_kills(vmstat: Path = VMSTAT) -> int:
    """Since the machine began; 0 where its kernel does not say (before Linux 4.13)."""
    counts = dict(line.split() for line in vmstat.read_text().splitlines()) if vmstat.is_file() else {}
    return int(counts.get("oom_kill", 0))
