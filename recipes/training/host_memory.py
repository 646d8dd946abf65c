"""How much memory of this machine is free, for copies that training can do without."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""A container sees its own limits here."""
LIMITS = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)
"""What limits, what is used, and what of that are files that were read or written, by cgroup's versions 2 and 1: the kernel
gives their memory back before it kills.
"""


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes that may be taken before something is killed for want of them: of the machine, and of its container's limit."""
    free = field(meminfo, "MemAvailable:") * 1024
    for limit, used, cached in LIMITS:
        if (cgroup / limit).is_file() and (most := (cgroup / limit).read_text().strip()).isdigit():
            files = sum(field((cgroup / limit).with_name("memory.stat"), name) for name in cached)
            free = min(free, max(0, int(most) - int((cgroup / used).read_text()) + files))
    return free


def field(file: Path, name: str) -> int:
    """The number behind a name at the beginning of a line; 0 where there is none."""
    lines = (line.split() for line in file.read_text().splitlines())
    return next((int(words[1]) for words in lines if words and words[0] == name), 0)
