"""Liveness of a process that serves no port: a file that it touches as long as it works.

A probe of Kubernetes looks at the file's age (`LIVENESS_SECONDS`), which costs no second interpreter.
"""

from pathlib import Path

LIVENESS_SECONDS = 120
"""Age of the file from which a process counts as hung."""
LIVENESS_SUFFIX = ".alive"


def liveness_file(home: Path, service: str) -> Path:
    return home / f"{service}{LIVENESS_SUFFIX}"


def report_alive(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
