"""A training on two nodes, with its losses and result."""

from pathlib import Path
from typing import Any

import httpx

from recipes.contracts.job import Job, Result, Tracking
from recipes.contracts.results import TrainingFacts
from tests.recipes.training.simulated_pods import NODES
from tests.recipes.training.training_workspace import Place
from tests.support.server_process import ServerProcess

STEPS = 40

FULL = {"method": "full", "dtype": "float32", "learning_rate": 1e-3}


def job_of(place: Place, server: ServerProcess, folder: Path, nodes: int, strategy: str, **changed: Any) -> Job:
    shape = {"strategy": strategy, "num_nodes": nodes, "gpus_per_node": NODES // nodes, "backend": "gloo"}
    settings = {"batch_size": 2, "max_steps": STEPS, "distributed": shape, **changed}
    made = httpx.post(f"{server.url}/api/2.0/mlflow/runs/create", json={"experiment_id": "0"}).json()
    tracking = Tracking(uri=server.url, run_id=made["run"]["info"]["run_id"])
    distributed = place.recipe.changed(settings).distributed
    return place.job(folder, settings).model_copy(update={"distributed": distributed, "tracking": tracking})


def result_of(place: Place, job: Job) -> Result:
    return Result.model_validate_json(place.store.get_bytes(job.result_uri))


def losses_of(result: Result) -> dict[int, float | None]:
    return TrainingFacts.model_validate(result.facts).losses
