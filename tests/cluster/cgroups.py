"""A cgroup of each node in every hierarchy of cgroup v1.

Two kubelets in one would end each other's pods.
"""

from pathlib import Path

from tests.cluster import processes

HIERARCHIES = Path("/sys/fs/cgroup")


def create(name: str) -> None:
    for hierarchy in HIERARCHIES.iterdir():
        if hierarchy.is_dir() and not hierarchy.is_symlink():
            (hierarchy / name).mkdir(exist_ok=True)
    for setting in ("cpuset.cpus", "cpuset.mems"):  # empty in a new one, which then accepts no process
        (HIERARCHIES / "cpuset" / name / setting).write_text((HIERARCHIES / "cpuset" / setting).read_text())


def remove(name: str) -> None:
    """End the remaining processes of a cgroup, and remove it with its children."""
    members = {pid for path in HIERARCHIES.glob(f"*/{name}/**/cgroup.procs") for pid in map(int, path.read_text().split())}
    processes.kill(members)
    for path in sorted(HIERARCHIES.glob(f"*/{name}/**/"), key=lambda path: len(path.parts), reverse=True):
        path.rmdir()


def limit_pod_cpu(name: str, pod_uid: str, share: float) -> None:
    """Limit a pod of a node to this share of a core."""
    (pod,) = (HIERARCHIES / "cpu" / name).glob(f"kubepods/**/pod{pod_uid}")
    period = int((pod / "cpu.cfs_period_us").read_text())
    (pod / "cpu.cfs_quota_us").write_text(str(round(period * share)))
