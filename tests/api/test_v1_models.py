"""/v1/models: stages with both verbs, pointers with numbers of their own, and the second names (rows O2, O6, O7, Z5, Z7)."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from recipes.store import Store
from resources.settings import Settings

FILES = "s3://hanzo-models/fraud/v0/weights"


@pytest.fixture
def models(http: TestClient, settings: Settings) -> TestClient:
    Store(settings.store).put_bytes(f"{FILES}/weights.bin", b"w")
    return http


def register(http: TestClient, where: str = "/v1/models/register", **body: Any) -> Any:
    return http.post(where, json={"name": "fraud", "artifact_uri": FILES, **body})


def test_files_are_registered_under_a_number_of_the_callers_own(models: TestClient) -> None:
    answer = register(models, "/api/v1/models/register", version="3.1", metrics={"auc": 0.97}, stage="staging")
    made = answer.json()
    assert answer.status_code == 201, made
    assert (made["version"], made["stage"], made["metrics"], made["source"]) == (1, "staging", {"auc": 0.97}, FILES)
    assert made["tags"]["hanzo.version"] == "3.1" and made["created_by"] == "local"
    assert models.get("/v1/models/fraud/versions/3.1").json()["version"] == 1
    assert register(models, version="3.1").json()["error_code"] == "RESOURCE_ALREADY_EXISTS"
    moved = models.put("/api/v1/models/fraud/versions/3.1/stage", json={"stage": "production"}).json()
    assert (moved["version"], moved["stage"]) == (1, "production")
    assert models.get("/v1/models/fraud/versions/3.2").status_code == 400


@pytest.mark.parametrize("uri", ["s3://b/x", "/etc/passwd", "runs:/nobody/model", "s3://hanzo-models/fraud/v0/absent"])
def test_files_that_are_not_there_are_not_registered(models: TestClient, uri: str) -> None:
    assert register(models, artifact_uri=uri).status_code == 400
    assert models.get("/v1/models").json() == {"models": []}


def test_an_unknown_stage_registers_nothing(models: TestClient) -> None:
    assert register(models, stage="prod").status_code == 400
    assert models.get("/v1/models").json() == {"models": []}


def test_a_stage_is_set_with_patch_and_with_put(models: TestClient) -> None:
    for _ in range(2):
        register(models)
    stage = "/v1/models/fraud/versions/{}/stage"
    assert models.patch(stage.format(1), json={"stage": "production"}).json()["stage"] == "production"
    assert models.put(stage.format(2), json={"stage": "canary", "traffic_percent": 20}).json()["stage"] == "canary"
    seen = models.get("/api/2.0/mlflow/model-versions/get", params={"name": "fraud", "version": "2"}).json()
    assert seen["model_version"]["current_stage"] == "Staging"
    assert {"key": "hanzo.stage", "value": "canary"} in seen["model_version"]["tags"]
    assert models.put(stage.format(2), json={"stage": "production"}).json()["tags"] == {}
    versions = models.get("/v1/models/fraud/versions").json()["versions"]
    assert {version["version"]: version["stage"] for version in versions} == {1: "archived", 2: "production"}
    assert models.put(stage.format(2), json={"stage": "production", "traffic_percent": 5}).status_code == 400
    assert models.put(stage.format(9), json={"stage": "staging"}).json()["error_code"] == "RESOURCE_DOES_NOT_EXIST"


def test_a_client_s_transition_and_ours_are_one_registry(models: TestClient) -> None:
    register(models)
    body = {"name": "fraud", "version": "1", "stage": "Archived"}
    assert models.post("/api/2.0/mlflow/model-versions/transition-stage", json=body).status_code == 200
    assert models.get("/v1/models/fraud/versions/1").json()["stage"] == "archived"


def test_a_version_says_what_its_run_logged_and_measured(http: TestClient) -> None:
    def registered(params: dict[str, Any], metrics: dict[str, float]) -> Any:
        run = http.post("/v1/runs", json={"experiment_name": "e", "params": params}).json()["id"]
        points = [{"key": key, "value": value} for key, value in metrics.items()]
        assert http.post(f"/v1/runs/{run}/metrics", json={"metrics": points}).status_code == 200
        http.post(f"/v1/runs/{run}/artifacts", params={"key": "weights"}, content=b"w")
        answer = http.post("/v1/models/m/versions", json={"run_id": run, "artifact": "weights"})
        assert answer.status_code == 201, answer.text
        return answer.json()["training_config"]

    params = {"dataset": "d", "dataset_version": 7, "learning_rate": 2e-5, "max_steps": 5000}
    measured = {"system/total_gpu_hours": 24.5, "system/total_steps": 4000}
    said = {"dataset": "d", "dataset_version": 7, "learning_rate": 2e-5}
    assert registered(params, measured) == {**said, "total_steps": 4000, "gpu_hours": 24.5}
    assert registered(params, {}) == {**said, "total_steps": 5000}, "no hours were measured, and none are claimed"
    assert registered({"dataset_version": "v7"}, {"system/total_gpu_hours": 0}) == {"dataset_version": "v7", "gpu_hours": 0}
