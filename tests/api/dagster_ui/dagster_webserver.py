"""Dagster's real web server, as on a cluster.

It has a path prefix, its own instance and two assets.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import httpx

from tests.support.free_ports import free_port

STARTS_WITHIN = 90.0
INSTANCE = """
telemetry: {enabled: false}
nux: {enabled: false}
run_coordinator: {module: dagster._core.run_coordinator, class: DefaultRunCoordinator}
"""


class DagsterWebserver:
    """A process of `python -m dagster_webserver`, and the code server that it starts."""

    def __init__(self, home: Path) -> None:
        self.home, self.port = home, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        (self.home / "dagster.yaml").write_text(INSTANCE)
        assets = Path(__file__).with_name("two_assets.py")
        options = ("-f", str(assets), "-h", "127.0.0.1", "-p", str(self.port), "--path-prefix", "/dagster")
        with (self.home / "dagster.log").open("ab") as log:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "dagster_webserver", *options),
                env={**os.environ, "DAGSTER_HOME": str(self.home)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + STARTS_WITHIN
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"Dagster did not start:\n{(self.home / 'dagster.log').read_text()[-3000:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/dagster/server_info", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False
