"""/v1/pipelines: the specification's API of training jobs, also below /api/v1, and unsupported requests."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

RECIPE = "smollm2-135m-lora"


@pytest.fixture
def made(http: TestClient) -> TestClient:
    records = b'{"instruction": "1+1", "answer": "2"}\n' * 4
    files = {"files": ("a.jsonl", records, "application/jsonl")}
    assert http.post("/v1/datasets", data={"name": "fraud"}, files=files).status_code == 201
    return http


def start(http: TestClient, path: str = "/api/v1/pipelines/runs", **config: Any) -> Any:
    return http.post(path, json={"pipeline_id": "fraud_model_v2", "config": config})


@pytest.mark.requirement("G9", "Z7")
@pytest.mark.parametrize("path", ["/v1/pipelines/runs", "/api/v1/pipelines/runs"])
def test_pipeline_run_with_a_recipe_submits_a_job(made: TestClient, path: str) -> None:
    asked = {"learning_rate": 1e-4, "lora_rank": 8}
    answer = start(
        made, path, data_source="fraud", model_type=RECIPE, hyperparams=asked, resources={"gpus": 1, "memory": "64Gi"}
    )
    run = answer.json()
    assert answer.status_code == 201, run
    assert run["run_id"] == run["job_id"] == run["id"]
    assert (run["pipeline_id"], run["status"]) == ("fraud_model_v2", "queued")
    job = made.get(f"/v1/jobs/{run['job_id']}").json()
    assert (job["name"], job["type"]) == ("fraud_model_v2", "training")
    assert job["config"] == {
        "name": "fraud_model_v2",
        "type": "training",
        "model": "sandbox",
        "dataset": "fraud@1",
        "recipe": RECIPE,
        "parameters": {**asked, "hardware": {"gpus": 1, "memory": "64Gi"}},
    }
    assert made.get(f"/v1/runs/{run['run_id']}").json()["status"] == "queued"


def test_pipeline_run_without_model_type_uses_the_model_definition(made: TestClient) -> None:
    answer = made.post("/api/v1/pipelines/runs", json={"pipeline_id": "ellarin-assistant"})
    assert answer.status_code == 201, answer.text
    assert answer.json()["config"]["model"] == "ellarin-assistant" and "recipe" not in answer.json()["config"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"data_source": "fraud", "model_type": "xgboost", "hyperparams": {"lr": 0.01, "depth": 8}}, "with a `command`"),
        ({"data_source": "s3://data/fraud/2024/", "model_type": RECIPE}, "hanzo-ml dataset create"),
        ({"data_source": "nobody", "model_type": RECIPE}, "there is no dataset 'nobody'"),
        ({"model_type": RECIPE}, "config.data_source is missing"),
        ({"data_source": "fraud", "model_type": RECIPE, "hyperparams": {"depth": 8}}, "depth"),
        ({"data_source": "fraud", "model_type": RECIPE, "resources": {"tpus": 4}}, "tpus"),
        ({"hyperparams": {"hardware": {"gpus": 1}}, "resources": {"gpus": 1}}, "give one of them"),
        ({"steps": []}, "steps"),
    ],
    ids=["type", "address", "dataset", "no data", "hyperparameter", "resource", "twice", "key"],
)
def test_unsupported_pipeline_run_is_refused_with_the_supported_options(
    made: TestClient, config: dict[str, Any], message: str
) -> None:
    answer = start(made, **config)
    assert answer.status_code in (400, 404), answer.text
    assert message in answer.json()["message"]
    assert made.get("/v1/jobs").json()["jobs"] == []
