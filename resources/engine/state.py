"""What the gateway was asked to serve, on disk: one JSON file, replaced whole, that only one gateway may use."""

import fcntl
import os
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter, ValidationError

from recipes.contracts.job import BadConfiguration
from resources.serving.messages import DeployRequest

REQUESTS = TypeAdapter(tuple[DeployRequest, ...])


class State:
    """The wanted deployments of one gateway. Holds a lock on the folder for as long as the process lives."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "deployments.json"
        self._lock = lock(folder)

    def read(self) -> tuple[DeployRequest, ...]:
        """Raises BadConfiguration when the file is not one that `write` wrote."""
        try:
            return REQUESTS.validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return ()
        except ValidationError:
            raise BadConfiguration(f"{self._file} is broken: delete it to start without deployments") from None

    def write(self, requests: tuple[DeployRequest, ...]) -> None:
        """Replace the file; after a crash it is the old or the new one, whole."""
        part = self._file.with_name(self._file.name + ".part")
        with part.open("wb") as file:
            file.write(REQUESTS.dump_json(requests, indent=1))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._file)


def lock(folder: Path) -> IO[bytes]:
    """Take the folder for this process; the kernel gives it back when the process ends."""
    file = (folder / "gateway.lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise BadConfiguration(f"another gateway uses {folder}: end it, or give another --state-dir") from None
    return file
