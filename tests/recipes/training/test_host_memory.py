"""Memory that copies may take: the least of what the machine has free and what a container may still use."""

from pathlib import Path

import pytest

from recipes.training.host_memory import free_memory

MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    8000 kB\n"
MACHINE = 8000 * 1024


def limited(folder: Path, limit: str, version: int) -> Path:
    """A cgroup that uses 5,000,000 bytes, of which 2,000,000 are files."""
    if version == 1:
        names, prefix, place = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_", folder / "memory"
    else:
        names, prefix, place = ("memory.max", "memory.current"), "", folder
    place.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, "5000000"), strict=True):
        (place / name).write_text(f"{value}\n")
    (place / "memory.stat").write_text(
        f"anon 3\n{prefix}inactive_file 1500000\n{prefix}active_file 500000\ninactive_anon 7\n"
    )
    return folder


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limit", "free"), [("4000000", 1_000_000), ("2000000", 0), ("90000000000", MACHINE), ("max", MACHINE)]
)
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, limit: str, free: int, version: int) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert free_memory(tmp_path / "meminfo", limited(tmp_path / "cgroup", limit, version)) == free


def test_without_limits_it_is_the_machine_s(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert free_memory(tmp_path / "meminfo", tmp_path / "none") == MACHINE
    assert free_memory() > 0
