"""Training jobs of one tiny model, on the test cluster or locally, with exact results."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from recipes.contracts.job import Hardware, Job, Result, Tracking
from recipes.contracts.results import TrainingFacts
from recipes.export.base_model import resolve_base_model
from recipes.storage.artifact_store import Store
from resources.compute.base import Follower
from resources.compute.local.backend import LocalCompute
from resources.metadata.jobs import Jobs
from tests.cluster.installation import Installation
from tests.recipes.training.training_workspace import Place
from tests.support.server_process import ServerProcess

STEPS = 150
"""Enough to be interrupted."""
FULL = {
    "method": "full",
    "dtype": "float32",
    "learning_rate": 1e-3,
    "batch_size": 2,
    "max_steps": STEPS,
    "eval_steps": 100,
    "checkpoint": {"interval": "1h", "interval_steps": 10, "keep_last": 3},
}
GANG_RECIPE = {
    "base_dtype": "float32",
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "batch_size": 2,
    "gradient_accumulation": 1,
    "sequence_length": 64,
    "max_steps": 4,
    "eval_steps": 4,
    "hardware": {"cpu": 1, "memory": "2Gi"},
    "checkpoint": {"interval": "1h", "interval_steps": 4, "keep_last": 3},
    "distributed": {"strategy": "fsdp", "num_nodes": 2, "gpus_per_node": 1, "backend": "gloo"},
}
"""Parameters of a LoRA training by two pods."""
QUIET = Follower(line=lambda line: None, phase=lambda seen: None)


@dataclass(frozen=True)
class Trained:
    """The loss of each step, and the SHA-256 of the weights."""

    losses: dict[int, float | None]
    weights: dict[str, str]
    resumed_from: int | None


@dataclass(frozen=True)
class Trainings:
    """Creates training jobs on the cluster."""

    installation: Installation
    place: Place

    @classmethod
    def in_folder(cls, installation: Installation, folder: Path) -> "Trainings":
        """Store the model and the splits of a folder in the installation's store."""
        place = Place(folder, installation.store)
        resolve_base_model(place.recipe.base_model, installation.store, folder)
        return cls(installation, place)

    def job(
        self,
        name: str,
        nodes: int = 2,
        processes: int = 2,
        steps: int = STEPS,
        recipe: dict[str, Any] | None = None,
        **changed: Any,
    ) -> Job:
        """Create a job with a run, not submitted yet.

        `recipe` changes the recipe, `changed` the job.
        """
        shape = {"strategy": "fsdp", "num_nodes": nodes, "gpus_per_node": processes // nodes, "backend": "gloo"}
        record = Jobs(self.installation.database).submit(
            name=name, config={"model": name}, user="tester", organization="default", status="running"
        )
        settings = {**FULL, "distributed": shape, "max_steps": steps, **(recipe or {})}
        job = self.place.job(self.place.folder / record.id, settings)
        distributed = self.place.recipe.changed(settings).distributed
        tracking = Tracking(uri=self.installation.url, run_id=record.id)
        return job.model_copy(update={"distributed": distributed, "tracking": tracking, "hardware": Hardware(), **changed})

    def trained(self, job: Job) -> Trained:
        result = self.installation.compute.result(job)
        assert result is not None
        return read_trained(result, self.installation.store)


def train_locally(folder: Path, recipe: dict[str, Any] | None = None) -> Trained:
    """Run the same training undisturbed, by two processes of this machine."""
    for name in ("local", "server"):
        (folder / name).mkdir()
    place = Place(folder / "local")
    shape = {"strategy": "fsdp", "num_nodes": 1, "gpus_per_node": 2, "backend": "gloo"}
    settings = {**FULL, "distributed": shape, **(recipe or {})}
    job = place.job(place.folder / "undisturbed", settings)
    with ServerProcess(folder / "server") as server:
        made = httpx.post(f"{server.url}/api/2.0/mlflow/runs/create", json={"experiment_id": "0"}).json()
        tracking = Tracking(uri=server.url, run_id=made["run"]["info"]["run_id"])
        distributed = place.recipe.changed(settings).distributed
        job = job.model_copy(update={"distributed": distributed, "tracking": tracking})
        return read_trained(LocalCompute(place.folder / "jobs").run(job, QUIET), place.store)


def read_trained(result: Result, store: Store) -> Trained:
    facts = TrainingFacts.model_validate(result.facts)
    files = store.manifest(result.artifacts["weights"]).files
    weights = {file.path: file.sha256 for file in files if file.path.endswith(".safetensors")}
    assert weights
    return Trained(facts.losses, weights, facts.resumed_from)


def assert_equal(trained: Trained, undisturbed: Trained) -> None:
    assert trained.losses == undisturbed.losses
    assert trained.weights == undisturbed.weights


def pods_of(installation: Installation, job: Job) -> list[dict[str, Any]]:
    row = installation.jobs.get(job)
    selector = f"ml.hanzo.ai/job={row.name}"
    found: list[dict[str, Any]] = installation.cluster.get("pods", f"--namespace={row.namespace}", f"--selector={selector}")[
        "items"
    ]
    return found


def nodes_of(installation: Installation, job: Job) -> list[str]:
    return sorted(pod["spec"]["nodeName"] for pod in pods_of(installation, job))


def find_process(installation: Installation, job: Job, program: str, **variables: str) -> int:
    """Find the process of a job's pods that runs a module with these variables.

    Returns its id on this machine. `recipes.train` is a rank, `recipes.launcher` the first process of a pod.
    """
    pods = f"POD_NAME={installation.jobs.get(job).name}".encode()  # the beginning of their names
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_ours = any(entry.startswith(pods) for entry in environment)
        if is_ours and program.encode() in words and wanted.issubset(environment):
            return int(folder.name)
    raise AssertionError(f"no process runs {program} with {variables}")


def kill_rank(installation: Installation, job: Job, node_rank: int = 0) -> None:
    """Kill one process that trains."""
    os.kill(find_process(installation, job, "recipes.train", LOCAL_RANK="0", NODE_RANK=str(node_rank)), signal.SIGKILL)
