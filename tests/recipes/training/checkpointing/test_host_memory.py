"""Host memory available for staging copies.

It is the least of the machine's free memory and the remaining limit of each cgroup of the process.
"""

from pathlib import Path

import pytest

from recipes.training.checkpointing.staging import free_memory

MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    8000 kB\n"
MACHINE = 8000 * 1024


def limited(folder: Path, limit: str, version: int) -> Path:
    """Create a cgroup that uses 5,000,000 bytes, of which 2,000,000 are page cache."""
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
def test_free_memory_respects_the_cgroup_limit(tmp_path: Path, limit: str, free: int, version: int) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert free_memory(tmp_path / "meminfo", limited(tmp_path / "cgroup", limit, version), tmp_path / "none") == free


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("step", "job", "free"),
    [("4000000", "max", 1_000_000), ("max", "4000000", 1_000_000), ("4000000", "3500000", 500_000), ("max", "max", MACHINE)],
)
def test_free_memory_respects_slurm_job_and_step_limits(
    tmp_path: Path, step: str, job: str, free: int, version: int
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    root = tmp_path / "cgroup"
    for path, limit in (("slurm/job_7", job), ("slurm/job_7/step_0", step), ("slurm/job_8", "1")):
        made = limited(tmp_path / "made", limit, version)
        place = root / ("memory" if version == 1 else "") / path
        place.mkdir(parents=True, exist_ok=True)
        for file in (made / ("memory" if version == 1 else "")).iterdir():
            file.rename(place / file.name)
    line = "4:cpuacct,memory:/slurm/job_7/step_0" if version == 1 else "0::/slurm/job_7/step_0"
    (tmp_path / "own").write_text(f"9:name=systemd:/slurm/job_8\n{line}\n")
    assert free_memory(tmp_path / "meminfo", root, tmp_path / "own") == free


@pytest.mark.parametrize("path", ["/../other", "/of/the:host"])
def test_free_memory_uses_own_limit_when_cgroup_path_is_outside_the_container(tmp_path: Path, path: str) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "own").write_text(f"0::{path}\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "memory.max").write_text("1")
    root = limited(tmp_path / "cgroup", "4000000", 2)
    assert free_memory(tmp_path / "meminfo", root, tmp_path / "own") == 1_000_000


def test_free_memory_is_that_of_the_machine_without_limits(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert free_memory(tmp_path / "meminfo", tmp_path / "none", tmp_path / "none") == MACHINE
    assert free_memory() > 0
