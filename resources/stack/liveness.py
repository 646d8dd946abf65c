"""Liveness file of a process without a port, touched while the process works.

A Kubernetes probe checks the file's age (`LIVENESS_SECONDS`), which needs no second interpreter.
"""

from pathlib import Path

LIVENESS_SECONDS = 120
"""Age of the file after which a process counts as hung."""
LIVENESS_SUFFIX = ".alive"


def liveness_file(home: Path, service: str) -> Path:
    return home / f"{service}{LIVENESS_SUFFIX}"


def report_alive(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
