"""Debian programs that tests need, installed if missing and permitted."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def found_or_installed(find: Callable[[], T | None], *packages: str) -> T | None:
    """Return what `find` finds, installing the packages first if needed.

    None if they cannot be installed. One process at a time: tests run in several, and apt-get refuses to run twice.
    """
    found = find()
    if found is not None or os.geteuid() != 0 or not shutil.which("apt-get"):
        return found
    with (Path(tempfile.gettempdir()) / "hanzo-ml-tests-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = find()
        if found is not None:
            return found
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            print("apt-get", *arguments)
            subprocess.run(["apt-get", "--quiet", *arguments], env=environment, check=False, stdout=subprocess.DEVNULL)
    return find()
