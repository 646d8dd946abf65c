"""What the cluster needs of the machine: root, Go, cgroups and Debian packages.

Missing packages are installed.
"""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from tests.cluster.build import VERSIONS
from tests.support.system_packages import found_or_installed

PACKAGES = (
    "runc",
    "containernetworking-plugins",
    "buildah",
    "debootstrap",
    "busybox-static",
    "iptables",
    "nftables",
    "conntrack",
    "ipset",
    "iproute2",
    "socat",
    "util-linux",
    "postgresql",
)


class Unsupported(Exception):
    """What this machine lacks, so that no cluster can run here."""


def require_machine(*, compiler: bool) -> None:
    """Install missing packages; raise with all missing things that only the user can add.

    The compiler is needed only where the cache does not have the cluster's programs yet.
    """
    missing = []
    if os.geteuid() != 0:
        missing.append("root: network namespaces, cgroups and containers need it; run it with sudo or in a container")
    if not Path("/sys/fs/cgroup/memory").is_dir():
        missing.append("cgroup v1: mount its hierarchies below /sys/fs/cgroup (no other has been tried)")
    if compiler:
        missing += missing_compiler()
    if found_or_installed(lambda: not missing_packages() or None, *PACKAGES) is None:
        missing.append(f"Debian packages: apt-get install {' '.join(missing_packages())}")
    if missing:
        raise Unsupported("the test cluster cannot run here. It lacks\n" + "\n".join(f"- {line}" for line in missing))


def missing_compiler() -> list[str]:
    wanted = tomllib.loads(VERSIONS.read_text())["go"]
    if not shutil.which("go"):
        return [f"Go {wanted} or newer: no program `go` on the PATH"]
    output = subprocess.run(["go", "version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"go(\d+(?:\.\d+)*)", output)
    if found is None or version(found[1]) < version(wanted):
        return [f"Go {wanted} or newer: this is {output.strip()}"]
    return []


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def missing_packages() -> list[str]:
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", *PACKAGES]
    if not shutil.which("dpkg-query"):
        return list(PACKAGES)
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    installed = {line.split()[0] for line in lines if line.endswith(" installed")}
    return [package for package in PACKAGES if package not in installed]
