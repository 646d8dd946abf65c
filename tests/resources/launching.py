"""Start detached processes, for tests and their subprocesses, without slow imports."""

import sys
from pathlib import Path

from resources.stack.detached_process import lock_folder, start_detached

WAITS = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]


def launch(folder: Path, command: list[str]) -> bool:
    """Start the command unless one runs; return whether it was started."""
    with lock_folder(folder) as descriptor:
        if descriptor is not None:
            start_detached(command, folder, descriptor, cwd=None, env={"ADDED": "yes"})
        return descriptor is not None
