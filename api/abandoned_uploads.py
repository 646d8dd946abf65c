"""At its start, and each day, a server removes what killed ones have left of uploads. Nobody waits for it, and it may end at
any moment.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping

from recipes.abandoned_uploads import DAY, remove_abandoned
from recipes.addresses import local_root
from recipes.schema import StoreAddress

log = logging.getLogger(__name__)


def remove_in_background(address: StoreAddress, variables: Mapping[str, str], stopped: threading.Event) -> None:
    """Until `stopped`. Trainers are killed while a server runs for months, and each may leave a part of a checkpoint."""

    def each_day() -> None:
        while not stopped.is_set():
            _remove(address, variables)
            stopped.wait(DAY)

    threading.Thread(target=each_day, daemon=True).start()


def _remove(address: StoreAddress, variables: Mapping[str, str]) -> None:
    try:
        on_s3 = local_root(address) is None
        removed = _remove_in_a_process(address, variables) if on_s3 else remove_abandoned(address)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("what is left of broken uploads could not be removed: %s", error)
    else:
        log.info("removed %d uploads that killed programs left unfinished", removed)


def _remove_in_a_process(address: StoreAddress, variables: Mapping[str, str]) -> int:
    command = [sys.executable, "-m", "recipes.abandoned_uploads", address.model_dump_json()]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return int(done.stdout)
