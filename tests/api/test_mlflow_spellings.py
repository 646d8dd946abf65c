"""Protobuf's JSON spells a field `run_id` or `runId`, and MLflow's server takes either, but not both in one message."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

M = "/api/2.0/mlflow"


def new_experiment(http: TestClient, name: str) -> str:
    return str(http.post(f"{M}/experiments/create", json={"name": name}).json()["experiment_id"])


def test_a_run_is_made_where_the_other_spelling_says(http: TestClient) -> None:
    experiment = new_experiment(http, "camel")
    body = {"experimentId": experiment, "startTime": "78", "runName": "hump"}
    made = http.post(f"{M}/runs/create", json=body).json()["run"]["info"]
    assert (made["experiment_id"], made["start_time"], made["run_name"]) == (experiment, 78, "hump")
    for path, named in (("log-parameter", {"runId": made["run_id"]}), ("set-tag", {"runUuid": made["run_id"]})):
        assert http.post(f"{M}/runs/{path}", json={**named, "key": "k", "value": "v"}).json() == {}
    asked = {"experimentIds": [experiment], "runViewType": "ALL", "maxResults": 1}
    [found] = http.post(f"{M}/runs/search", json=asked).json()["runs"]
    assert (found["info"]["run_id"], found["data"]["params"]) == (made["run_id"], [{"key": "k", "value": "v"}])


def test_a_message_in_a_message_may_be_spelled_so_too(http: TestClient) -> None:
    experiment = new_experiment(http, "models")
    models = [
        http.post(f"{M}/logged-models", json={"experimentId": experiment, "name": name}).json()["model"]["info"]["model_id"]
        for name in ("a", "b")
    ]
    run_id = http.post(f"{M}/runs/create", json={"experiment_id": experiment}).json()["run"]["info"]["run_id"]
    # The short way of the hot calls, whose struct knows the usual spelling.
    point = {"key": "acc", "value": 1.0, "timestamp": 1, "modelId": models[0], "datasetName": "d", "datasetDigest": "1"}
    assert http.post(f"{M}/runs/log-batch", json={"run_id": run_id, "metrics": [point]}).json() == {}
    assert http.post(f"{M}/runs/log-metric", json={"run_id": run_id, **point, "key": "f1"}).json() == {}
    held = http.get(f"{M}/logged-models/{models[0]}").json()["model"]["data"]["metrics"]
    assert [(each["key"], each["dataset_name"]) for each in held] == [("acc", "d"), ("f1", "d")]
    order = [{"fieldName": "name", "ascending": False}]
    found = http.post(f"{M}/logged-models/search", json={"experimentIds": [experiment], "orderBy": order}).json()["models"]
    assert [each["info"]["name"] for each in found] == ["b", "a"]


@pytest.mark.parametrize("path", ["update", "set-tag", "log-parameter", "log-metric", "log-batch"])
@pytest.mark.parametrize("both", [{"runId": "other"}, {"runUuid": "other", "run_uuid": "RUN"}])
def test_both_spellings_in_one_message_are_refused(http: TestClient, path: str, both: dict[str, Any]) -> None:
    """As in MLflow: whoever checks the one must not act on the other."""
    run_id = http.post(f"{M}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
    answer = http.post(f"{M}/runs/{path}", json={"run_id": run_id, "key": "k", "value": "1", "timestamp": 1, **both})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert "provide only one of them" in answer.json()["message"]
