"""Protobuf's JSON allows `run_id` and `runId`, but not both in one message.

MLflow's server accepts either.
"""

from typing import Any

import pytest
from fastapi.testclient import TestClient

M = "/api/2.0/mlflow"


def new_experiment(http: TestClient, name: str) -> str:
    return str(http.post(f"{M}/experiments/create", json={"name": name}).json()["experiment_id"])


def test_camel_case_fields_are_accepted_for_runs(http: TestClient) -> None:
    experiment = new_experiment(http, "camel")
    body = {"experimentId": experiment, "startTime": "78", "runName": "hump"}
    made = http.post(f"{M}/runs/create", json=body).json()["run"]["info"]
    assert (made["experiment_id"], made["start_time"], made["run_name"]) == (experiment, 78, "hump")
    for path, named in (("log-parameter", {"runId": made["run_id"]}), ("set-tag", {"runUuid": made["run_id"]})):
        assert http.post(f"{M}/runs/{path}", json={**named, "key": "k", "value": "v"}).json() == {}
    asked = {"experimentIds": [experiment], "runViewType": "ALL", "maxResults": 1}
    [found] = http.post(f"{M}/runs/search", json=asked).json()["runs"]
    assert (found["info"]["run_id"], found["data"]["params"]) == (made["run_id"], [{"key": "k", "value": "v"}])


def test_camel_case_fields_are_accepted_in_nested_messages(http: TestClient) -> None:
    experiment = new_experiment(http, "models")
    models = [
        http.post(f"{M}/logged-models", json={"experimentId": experiment, "name": name}).json()["model"]["info"]["model_id"]
        for name in ("a", "b")
    ]
    run_id = http.post(f"{M}/runs/create", json={"experiment_id": experiment}).json()["run"]["info"]["run_id"]
    # The fast path of logging calls, whose struct knows the usual spelling.
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
    """As in MLflow: checking one spelling must not permit using the other."""
    run_id = http.post(f"{M}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
    answer = http.post(f"{M}/runs/{path}", json={"run_id": run_id, "key": "k", "value": "1", "timestamp": 1, **both})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert "provide only one of them" in answer.json()["message"]


def test_number_as_batch_param_or_tag_is_stored_as_text(http: TestClient) -> None:
    """FastTrackML's tests send numbers here.

    MLflow's server accepts them too, but stores an empty text, which loses them.
    """
    run_id = http.post(f"{M}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
    sent = {"int": 123, "float": 123.45, "whole": 1.0, "small": 1e-07, "negative": -4, "large": 12345678901234567890}
    pairs = [{"key": key, "value": value} for key, value in sent.items()]
    body = {"run_id": run_id, "params": pairs, "tags": pairs}
    for _ in range(2):
        answer = http.post(f"{M}/runs/log-batch", json=body)
        assert (answer.status_code, answer.json()) == (200, {})
    data = http.get(f"{M}/runs/get", params={"run_id": run_id}).json()["run"]["data"]
    expected = {key: str(value) for key, value in sent.items()}
    assert {each["key"]: each["value"] for each in data["params"]} == expected
    assert {each["key"]: each["value"] for each in data["tags"]}.items() >= expected.items()


@pytest.mark.parametrize("kind", ["params", "tags"])
@pytest.mark.parametrize("value", [True, [1], {"a": 1}])
def test_structured_value_as_batch_param_or_tag_is_refused(http: TestClient, kind: str, value: Any) -> None:
    run_id = http.post(f"{M}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
    answer = http.post(f"{M}/runs/log-batch", json={"run_id": run_id, kind: [{"key": "k", "value": value}]})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert f"for parameter '{kind}[0].value' supplied" in answer.json()["message"]


@pytest.mark.parametrize("written", ["NaN", "Infinity", "-Infinity"])
def test_nonfinite_number_as_batch_param_is_refused(http: TestClient, written: str) -> None:
    run_id = http.post(f"{M}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
    body = f'{{"run_id": "{run_id}", "params": [{{"key": "k", "value": {written}}}]}}'
    answer = http.post(f"{M}/runs/log-batch", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE"), answer.text


@pytest.mark.parametrize("path", ["log-parameter", "set-tag"])
def test_number_as_single_param_or_tag_is_refused(http: TestClient, path: str) -> None:
    """MLflow's server refuses it there, and its tests require it."""
    run_id = http.post(f"{M}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
    answer = http.post(f"{M}/runs/{path}", json={"run_id": run_id, "key": "k", "value": 41})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert "Invalid value 41 for parameter 'value' supplied" in answer.json()["message"]
