"""Free host memory, within the limits of the process's cgroups."""

from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
OWN_CGROUPS = Path("/proc/self/cgroup")
"""Lines such as `4:memory:/slurm/uid_0/job_7/step_0`, and of version 2 `0::/system.slice/slurm/job_7/step_0`."""
CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("", "memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)
"""Of cgroup's versions 2 and 1: its name, in a process's lines and as a folder; what limits, what is used, and what of that
are files that were read or written: the kernel gives their memory back before it kills.
"""


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN_CGROUPS) -> int:
    """Bytes that may be taken before something is killed for want of them: of the machine, and of each group that this
    process is in. A step of Slurm limits its processes in one, and so may its job, above it.
    """
    free = read_field(meminfo, "MemAvailable:") * 1024
    for version, limit, used, cached in CGROUP_FILES:
        for group in enclosing_cgroups(cgroup / version, cgroup_path(own, version)):
            if (group / limit).is_file() and (most := (group / limit).read_text().strip()).isdigit():
                files = sum(read_field(group / "memory.stat", name) for name in cached)
                free = min(free, max(0, int(most) - int((group / used).read_text()) + files))
    return free


def cgroup_path(own: Path, controller: str) -> str:
    """Of this process's group, below the root; the root's where it is in none, or nothing says."""
    lines = (line.split(":", 2) for line in own.read_text().splitlines()) if own.is_file() else ()
    return next((path for _, controllers, path in lines if controller in controllers.split(",")), "/")


def enclosing_cgroups(root: Path, path: str) -> Iterator[Path]:
    """The group at `path` and those above it, up to `root`. A container sees its own as the root: it has no folder for a
    path of its host's, nor one that leads out of it, such as `/../x`.
    """
    inner = root if ".." in path.split("/") else root / path.lstrip("/")
    yield from (inner, *inner.parents[: len(inner.relative_to(root).parts)])


def read_field(file: Path, name: str) -> int:
    """The number behind a name at the beginning of a line; 0 where there is none."""
    lines = (line.split() for line in file.read_text().splitlines())
    return next((int(words[1]) for words in lines if words and words[0] == name), 0)
