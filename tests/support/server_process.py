"""The real server in a separate process, with its own loopback port and state folder."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import httpx

from resources.metadata.database import Database
from resources.settings.settings import Settings
from tests.support.free_ports import free_port
from tests.support.migrated_database import migrate

REPOSITORY = Path(__file__).parents[2]
STARTS_WITHIN = 60.0
ENDS_WITHIN = 60.0


def environment(home: Path, port: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a server's environment without the caller's Hanzo ML and MLflow variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HANZO_ML_", "MLFLOW_"))}
    own = {"HANZO_ML_HOME": str(home), "HANZO_ML_SERVER_PORT": str(port), "HANZO_ML_METRICS_ENABLED": "false"}
    return {**kept, **own, **(extra or {})}


class ServerProcess:
    """Run `python -m api.server`, restartable on the same port and state."""

    command: tuple[str, ...] = (sys.executable, "-m", "api.server")
    ready = "/ready"

    def __init__(self, home: Path, extra: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.port = free_port()
        self.environment = environment(home, self.port, extra)
        self.settings = Settings.load(self.environment)
        self.url = self.settings.tracking_uri
        self._process: subprocess.Popen[bytes] | None = None
        database = Database(self.settings.database_url)
        migrate(database)
        database.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        log = (self.home / "server.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                self.command,
                cwd=REPOSITORY,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + STARTS_WITHIN
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start:\n{(self.home / 'server.log').read_text()}")
            time.sleep(0.02)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL: no handler runs, nothing is flushed."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self.is_running:
            self._process.terminate()
            self._process.wait()

    def wait(self) -> int:
        """Wait until the process ends by itself and return its exit status."""
        assert self._process is not None
        return self._process.wait(ENDS_WITHIN)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}{self.ready}").status_code == 200
        except httpx.TransportError:
            return False
