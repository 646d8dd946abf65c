"""Real gateway processes for tests, on free ports.

Only processes started here are ended, by their id.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from resources.serving.client import EngineClient
from tests.support.free_ports import free_port

ROOT = Path(__file__).parents[3]


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Gateway:
    """Run `python -m resources.serving.gateway`, restartable on the same port and state."""

    def __init__(self, state_dir: Path, port: int | None = None) -> None:
        self.state_dir = state_dir
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.engine = EngineClient(self.url)
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "resources.serving.gateway", "--port", str(self.port)]
        self.process = subprocess.Popen([*command, "--state-dir", str(self.state_dir)], cwd=ROOT)
        wait_until(self.is_healthy)
        return self.process

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def backends(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        self.process.wait(timeout=40)
