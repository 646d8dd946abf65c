"""Second compute backend as a package: jobs whose state is an in-memory log."""

import importlib
import sys
from pathlib import Path

import pytest

import resources.compute

SOURCE = """
from resources.compute.base import Compute, Observation, Phase

LOGS = {}


class MemoryCompute(Compute):
    def submit(self, job):
        LOGS.setdefault((job.id, job.program), b"")

    def observe(self, job):
        return Observation(Phase.RUNNING, 1)

    def cancel(self, job):
        LOGS.pop((job.id, job.program), None)

    def read_log(self, job, offset, max_bytes=None):
        return LOGS.get((job.id, job.program), b"")[offset:][:max_bytes]

    def log_size(self, job):
        return len(LOGS.get((job.id, job.program), b""))

    def has_processes(self, job):
        return (job.id, job.program) in LOGS

    def terminate_processes(self, job):
        self.cancel(job)

    def queued_until(self, job):
        return 0


def open_backend(settings, credentials):
    return MemoryCompute(credentials=credentials)
"""


def register(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[tuple[str, str], bytes]:
    """Register the backend `memory` and return its logs by job id and program."""
    package = folder / "memory"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "backend.py").write_text(SOURCE)
    monkeypatch.setattr(resources.compute, "__path__", [*resources.compute.__path__, str(folder)])
    for name in ("resources.compute.memory", "resources.compute.memory.backend"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    logs: dict[tuple[str, str], bytes] = importlib.import_module("resources.compute.memory.backend").LOGS
    return logs
