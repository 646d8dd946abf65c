"""Memory counters of a container: its limit, its peak, and its OOM kills.

A program cannot report that it or one of its workers was killed for memory, and the container runtime reports only the
first process, which is the launcher. The cgroup's counters are the evidence, for cgroup v1 and v2.
"""

from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 60
"""cgroup v1 expresses "no limit" as the largest number of pages."""


@dataclass(frozen=True)
class MemoryCounters:
    """Counters of a cgroup; `limit` and `peak` are in bytes, None if unknown.

    `kills` counts processes that the kernel killed for lack of memory.
    """

    kills: int
    limit: int | None
    peak: int | None


def read_memory_counters(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> MemoryCounters:
    """Read the counters of this process's cgroup; all unknown, and no kills, without one."""
    lines = [line.split(":", 2) for line in _read(membership).splitlines()]
    paths = {controllers: path for _, controllers, path in lines}
    version_1 = next((path for names, path in paths.items() if "memory" in names.split(",")), None)
    if version_1 is not None:
        folder = _folder(cgroups / "memory", version_1)
        counted = _read(folder / "memory.oom_control")
        return MemoryCounters(
            _field(counted, "oom_kill"),
            _number(folder / "memory.limit_in_bytes"),
            _number(folder / "memory.max_usage_in_bytes"),
        )
    folder = _folder(cgroups, paths.get("", "/"))
    return MemoryCounters(
        _field(_read(folder / "memory.events"), "oom_kill"), _number(folder / "memory.max"), _number(folder / "memory.peak")
    )


def describe_kill(counters: MemoryCounters) -> str:
    """Return the reason for a kill by the kernel as one line for users."""
    peak = f", peak {_gib(counters.peak)}" if counters.peak is not None else ""
    if counters.limit is None:
        return f"killed by the kernel, because the node ran out of memory (no limit of its own{peak})"
    return (
        f"killed by the kernel at the memory limit of {_gib(counters.limit)}{peak}: "
        "give it more memory, or let it use less (smaller batches, fewer workers)"
    )


def _folder(mount: Path, path: str) -> Path:
    """Return the folder of a cgroup.

    In a container the mount itself, for any path the kernel reports.
    """
    inner = mount / path.lstrip("/")
    return inner if inner.is_dir() else mount


def _field(text: str, name: str) -> int:
    fields = (line.split() for line in text.splitlines())
    return next((int(words[1]) for words in fields if len(words) == 2 and words[0] == name), 0)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() and int(text) < UNLIMITED_BYTES else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
