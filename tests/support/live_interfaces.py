"""Interfaces of a running server, started by the command line and queried over HTTP.

The state folder is empty.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.free_ports import free_port
from tests.support.live_names import ROOT, Groups, keys_of, tables

START_SECONDS = 60
COMMAND = (sys.executable, "-m", "hanzo_ml")


@dataclass(frozen=True)
class Interfaces:
    """`document` is the OpenAPI document, `settings` are dotted keys of the configuration file."""

    document: dict[str, Any]
    prometheus: tuple[str, ...]
    settings: tuple[str, ...]
    tables: Groups


def read_interfaces(home: Path) -> Interfaces:
    port, metrics_port = free_port(), free_port()
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HANZO_ML_")},
        "HANZO_ML_HOME": str(home),
        "HANZO_ML_SERVER_PORT": str(port),
        "HANZO_ML_METRICS_PORT": str(metrics_port),
    }
    shown = subprocess.run([*COMMAND, "config", "show"], env=environment, cwd=ROOT, check=True, capture_output=True)
    server = subprocess.Popen([*COMMAND, "server", "run"], env=environment, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        document = first_answer(f"http://127.0.0.1:{port}/openapi.json").json()
        page = first_answer(f"http://127.0.0.1:{metrics_port}/metrics").text
    finally:
        server.terminate()
        server.wait()
    return Interfaces(
        document=document,
        prometheus=tuple(line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")),
        settings=tuple(keys_of(yaml.safe_load(shown.stdout))),
        tables=tables(home / "hanzo-ml.db"),
    )


def first_answer(url: str) -> httpx.Response:
    """Return the response of a server that may still be starting."""
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            return httpx.get(url, trust_env=False, timeout=10).raise_for_status()
        except httpx.HTTPError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
