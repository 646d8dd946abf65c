"""Memory counters of a container in both versions of cgroups."""

from pathlib import Path

import pytest

from recipes.launch.cgroup_memory import MemoryCounters, describe_kill, read_memory_counters

VERSION_1 = {
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "memory.limit_in_bytes": "1073741824\n",
    "memory.max_usage_in_bytes": "1073741824\n",
}
VERSION_2 = {
    "memory.events": "low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\noom_group_kill 0\n",
    "memory.max": "1073741824\n",
    "memory.peak": "1073741824\n",
}


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "folder", "membership"),
    [
        pytest.param(VERSION_1, "memory/pods/a", "9:cpu:/\n4:memory:/pods/a\n", id="version 1 on a machine"),
        pytest.param(VERSION_1, "memory", "4:memory:/kubepods/pod1/a\n0::/\n", id="version 1 in a container"),
        pytest.param(VERSION_2, "", "0::/\n", id="version 2 in a container"),
        pytest.param(VERSION_2, "pods/a", "0::/pods/a\n", id="version 2 on a machine"),
    ],
)
def test_memory_counters_are_read_from_own_cgroup(
    tmp_path: Path, files: dict[str, str], folder: str, membership: str
) -> None:
    write(tmp_path / "fs" / folder, files)
    write(tmp_path, {"cgroup": membership})
    found = read_memory_counters(tmp_path / "fs", tmp_path / "cgroup")
    assert found == MemoryCounters(kills=2, limit=1 << 30, peak=1 << 30)
    assert "memory limit of 1.00 GiB, peak 1.00 GiB" in describe_kill(found)


def test_memory_kill_without_limit_is_blamed_on_the_node(tmp_path: Path) -> None:
    write(tmp_path / "fs", {**VERSION_2, "memory.max": "max\n"})
    write(tmp_path, {"cgroup": "0::/\n"})
    found = read_memory_counters(tmp_path / "fs", tmp_path / "cgroup")
    assert found.limit is None
    assert "the node ran out of memory" in describe_kill(found)


def test_memory_counters_are_empty_without_cgroups(tmp_path: Path) -> None:
    assert read_memory_counters(tmp_path / "fs", tmp_path / "cgroup") == MemoryCounters(0, None, None)
