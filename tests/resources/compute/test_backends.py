"""Backend registry: each folder is a backend; an unknown name lists the available ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.contracts.job import BadConfiguration
from resources.compute.backends import backend_names, open_backend
from resources.compute.local.backend import LocalCompute
from resources.settings.settings import Settings
from tests.resources.compute.second_backend import register


def load(home: Path, backend: str | None = None) -> Settings:
    chosen = {"HANZO_ML_SCHEDULER_BACKEND": backend} if backend else {}
    return Settings.load({"HANZO_ML_HOME": str(home), **chosen})


def test_local_is_the_default_and_works_in_the_state_folder(tmp_path: Path) -> None:
    compute = open_backend(load(tmp_path))
    assert isinstance(compute, LocalCompute) and compute.jobs == tmp_path / "jobs"


@pytest.mark.parametrize("name", ["slurm", "", "base", "../local"])
def test_unknown_backend_is_refused_with_the_list_of_backends(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_text(f"scheduler: {{backend: '{name}'}}\n")
    refused = rf"'scheduler\.backend': unknown backend '{name}', available: kubernetes, local$"
    with pytest.raises(BadConfiguration, match=refused):
        load(tmp_path)


def test_opening_checks_the_backend_of_settings_that_were_not_loaded(tmp_path: Path) -> None:
    settings = load(tmp_path)
    unchecked = settings.model_copy(update={"scheduler": settings.scheduler.model_copy(update={"backend": "slurm"})})
    refused = r"^scheduler\.backend: unknown backend 'slurm', available: kubernetes, local$"
    with pytest.raises(BadConfiguration, match=refused):
        open_backend(unchecked)


@pytest.mark.requirement("J12")
def test_folder_with_a_backend_module_is_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, tmp_path / "backends")
    assert backend_names() == ["kubernetes", "local", "memory"]
    assert type(open_backend(load(tmp_path, "memory"))).__name__ == "MemoryCompute"
    with pytest.raises(BadConfiguration, match=r"available: kubernetes, local, memory$"):
        load(tmp_path, "slurm")


def test_opening_loads_neither_dagster_nor_the_gpu_driver(tmp_path: Path) -> None:
    code = (
        "import sys; from resources.compute.backends import open_backend; from resources.settings.settings import Settings\n"
        "from resources.compute.base import JobRef; from recipes.contracts.job import Program\n"
        f"compute = open_backend(Settings.load({{'HANZO_ML_HOME': {str(tmp_path)!r}}}))\n"
        "compute.read_log(JobRef('j', Program.TRAIN), 0)\n"
        "print({'dagster', 'torch', 'pynvml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stderr
