"""Cached runs equal uncached ones, after any calls in any order."""

import json
import random
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient

from api.schemas.mlflow.runs import run_message
from resources.metadata.database import Database
from resources.metadata.tracking.tracking import Tracking

MLFLOW = "/api/2.0/mlflow"
V1 = "/v1/runs"
CALLS = 200


def calls(run_id: str, model_id: str, drawn: random.Random) -> dict[str, tuple[str, Any]]:
    """Return one call of each kind that changes a run's message."""
    key, value = f"k{drawn.randrange(4)}", f"v{drawn.randrange(3)}"
    metric = {"key": key, "value": drawn.random(), "timestamp": drawn.randrange(5), "step": drawn.randrange(5)}
    tag = {"key": key, "value": value}
    dataset = {"dataset": {"name": key, "digest": value, "source_type": "local", "source": "here"}, "tags": [tag]}
    batch = {"metrics": [metric], "params": [{"key": key, "value": key}], "tags": [tag]}
    model = {"artifact_path": key, "flavors": {}, "utc_time_created": value, "run_id": run_id}
    return {
        f"{MLFLOW}/runs/log-metric": ("POST", {"run_id": run_id, **metric}),
        f"{MLFLOW}/runs/log-batch": ("POST", {"run_id": run_id, **batch}),
        f"{MLFLOW}/runs/log-parameter": ("POST", {"run_id": run_id, "key": key, "value": key}),
        f"{MLFLOW}/runs/set-tag": ("POST", {"run_id": run_id, **tag}),
        f"{MLFLOW}/runs/delete-tag": ("POST", {"run_id": run_id, "key": key}),
        f"{MLFLOW}/runs/update": ("POST", {"run_id": run_id, "run_name": value, "status": "FINISHED"}),
        f"{MLFLOW}/runs/delete": ("POST", {"run_id": run_id}),
        f"{MLFLOW}/runs/restore": ("POST", {"run_id": run_id}),
        f"{MLFLOW}/runs/log-inputs": ("POST", {"run_id": run_id, "datasets": [dataset], "models": [{"model_id": model_id}]}),
        f"{MLFLOW}/runs/outputs": ("POST", {"run_id": run_id, "models": [{"model_id": model_id, "step": metric["step"]}]}),
        f"{MLFLOW}/runs/log-model": ("POST", {"run_id": run_id, "model_json": json.dumps(model)}),
        f"{V1}/{run_id}/metrics": ("POST", {"metrics": [metric]}),
        f"{V1}/{run_id}/params": ("POST", {"params": {key: key}}),
        f"{V1}/{run_id}/status": ("PATCH", {"status": drawn.choice(["running", "completed", "failed"])}),
    }


def read_stored_run(database: Database, run_id: str) -> Any:
    tracking = Tracking(database)
    return json.loads(msgspec.json.encode(run_message(tracking.run_search.get(tracking.runs.get(run_id)))))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_cached_runs_equal_stored_runs_after_random_calls(http: TestClient, seed: int) -> None:
    drawn = random.Random(seed)
    database: Database = http.app.state.database  # type: ignore[attr-defined]
    runs = [
        http.post(f"{MLFLOW}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"] for _ in range(3)
    ]
    model_id = http.post(f"{MLFLOW}/logged-models", json={"experiment_id": "0"}).json()["model"]["info"]["model_id"]
    succeeded: set[str] = set()
    for _ in range(CALLS):
        run_id = drawn.choice(runs)
        kinds = sorted(calls(run_id, model_id, drawn).items())
        # A deleted run refuses all others.
        often = [4 if path.endswith("/restore") else 1 for path, _ in kinds]
        [(path, (method, body))] = drawn.choices(kinds, often)
        answer = http.request(method, path, json=body)
        assert answer.status_code < 500
        if answer.status_code == 200:
            succeeded.add(path.replace(run_id, "RUN"))
        found = http.post(f"{MLFLOW}/runs/search", json={"experiment_ids": ["0"], "run_view_type": "ALL"}).json()["runs"]
        assert {run["info"]["run_id"]: run for run in found} == {run: read_stored_run(database, run) for run in runs}, path
        assert http.get(f"{MLFLOW}/runs/get", params={"run_id": run_id}).json()["run"] == read_stored_run(database, run_id)
    assert len(succeeded) == len(calls(run_id, model_id, drawn)), "each kind of call succeeded at least once"
