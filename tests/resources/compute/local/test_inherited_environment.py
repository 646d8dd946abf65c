"""Environment of local jobs: what they need, and no secret of the stack."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import Job, StoreAddress
from resources.compute.local.backend import LocalCompute
from resources.compute.local.inherited_environment import inherited_environment
from resources.settings.settings import Settings
from resources.stack.detached_process import PID_FILE
from resources.stack.services import service_environment
from tests.support.resources.local_backend import Watcher, job_that, let_finish, source, starts, until

__all__ = ["job_that", "source"]

DATABASE = "postgresql://hanzo:the-password@db:5432/hanzo_ml"
KEYS = {"AWS_ACCESS_KEY_ID": "the-key", "AWS_SECRET_ACCESS_KEY": "the-secret-key", "AWS_REGION": "eu-central-1"}
SECRETS = {
    "HANZO_ML_DATABASE_URL": DATABASE,
    "HANZO_ML_STORAGE_SECRET_KEY": "the-secret-key",
    "DATABASE_URL": DATABASE,
    "PGPASSWORD": "the-password",
    "MLFLOW_TRACKING_TOKEN": "somebody's token",
    "KUBECONFIG": "/root/.kube/config",
    "GITHUB_TOKEN": "another token",
    **KEYS,
}
NEEDED = {
    "PATH": "/usr/bin",
    "HOME": "/home/ann",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "CUDA_HOME": "/usr/local/cuda",
    "NCCL_DEBUG": "INFO",
    "HF_TOKEN": "of the hub",
    "HTTPS_PROXY": "http://proxy:3128",
    "no_proxy": "localhost",
    "OMP_NUM_THREADS": "4",
    "PYTHONPATH": "/opt/hanzo-ml",
    "XDG_CACHE_HOME": "/home/ann/.cache",
}
FOLDER = StoreAddress(root="file:///objects", buckets={})
SERVER = StoreAddress(root="https://s3:9000", buckets={})
SIGNED = StoreAddress(root="api+http://ml.hanzo.svc:8057/v1/jobs/j/programs/train/objects", buckets={})


@pytest.mark.parametrize("store", [FOLDER, SIGNED])
def test_job_inherits_what_it_needs_and_no_secret(store: StoreAddress) -> None:
    assert inherited_environment(NEEDED | SECRETS, store) == NEEDED


def test_job_inherits_the_keys_of_a_store_that_asks_for_them() -> None:
    assert inherited_environment(NEEDED | SECRETS, SERVER) == NEEDED | KEYS


def test_store_keys_of_the_stack_are_inherited(tmp_path: Path) -> None:
    """Jobs are children of the stack's processes and do not read settings."""
    variables = {"STORAGE_ENDPOINT": SERVER.root, "STORAGE_ACCESS_KEY": "a", "STORAGE_SECRET_KEY": "b"}
    given = {f"HANZO_ML_{name}": value for name, value in variables.items()}
    settings = Settings.load({"HANZO_ML_HOME": str(tmp_path), **given})
    inherited = inherited_environment(service_environment(settings), settings.store)
    assert settings.storage.variables.items() <= inherited.items()
    assert not [name for name in inherited if name.startswith(("HANZO_ML_", "DAGSTER_"))]


def read_environment(job: Job) -> dict[str, str]:
    process = json.loads((Path(job.work_dir) / PID_FILE).read_text())
    text = Path(f"/proc/{process}/environ").read_text()
    return dict(variable.split("=", 1) for variable in text.split("\0") if variable)


def test_running_program_has_no_secret_of_its_supervisor(
    source: Path, job_that: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    compute = LocalCompute(tmp_path / "jobs", source=source, poll_seconds=0.02)
    job: Any = job_that("wait", env={"WANDB_PROJECT": "declared"})
    compute.submit(job)
    until("its start", lambda: starts(job) == 1)
    found = read_environment(job)
    assert found["WANDB_PROJECT"] == "declared" and not SECRETS.keys() & found.keys()
    assert not [name for name, value in found.items() if value in SECRETS.values()]
    let_finish(job)
    compute.run(job, Watcher().follower)
