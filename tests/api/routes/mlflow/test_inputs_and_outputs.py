"""Inputs on the wire: valid inputs, listed datasets, and the message of a run."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

MLFLOW = "/api/2.0/mlflow"
DATASET = {"name": "d", "digest": "1", "source_type": "local", "source": "here", "schema": "{}", "profile": "{}"}
PATHS = [
    "/api/2.0mlflow/experiments/search-datasets",
    "/ajax-api/2.0mlflow/experiments/search-datasets",
    "/api/2.0/mlflow/experiments/search-datasets",
    "/ajax-api/2.0/mlflow/experiments/search-datasets",
]


def new_run(http: TestClient) -> str:
    return str(http.post(f"{MLFLOW}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"])


def test_run_inputs_are_logged_and_summarized(http: TestClient) -> None:
    run_id = new_run(http)
    assert http.get(f"{MLFLOW}/runs/get", params={"run_id": run_id}).json()["run"]["inputs"] == {}
    model_id = http.post(f"{MLFLOW}/logged-models", json={"experiment_id": "0"}).json()["model"]["info"]["model_id"]
    tags = [{"key": "z", "value": "1"}, {"key": "mlflow.data.context", "value": "train"}]
    bare = {"dataset": {"name": "bare", "digest": "2", "schema": None}}
    body = {"run_id": run_id, "datasets": [{"dataset": DATASET, "tags": tags}, bare], "models": [{"model_id": model_id}]}
    assert http.post(f"{MLFLOW}/runs/log-inputs", json=body).json() == {}
    stored = http.get(f"{MLFLOW}/runs/get", params={"run_id": run_id}).json()["run"]
    expected = [
        {"dataset": {"name": "bare", "digest": "2", "source_type": "", "source": ""}, "tags": []},
        {"dataset": DATASET, "tags": tags},
    ]
    assert sorted(stored["inputs"]["dataset_inputs"], key=lambda used: used["dataset"]["name"]) == expected
    assert stored["inputs"]["model_inputs"] == [{"model_id": model_id}]
    for path in PATHS:
        assert http.post(path, json={"experiment_ids": ["0"]}).json() == {
            "dataset_summaries": [
                {"experiment_id": "0", "name": "bare", "digest": "2"},
                {"experiment_id": "0", "name": "d", "digest": "1", "context": "train"},
            ]
        }


def test_dataset_profile_above_the_length_limit_is_refused(http: TestClient) -> None:
    run_id, largest = new_run(http), "p" * 16_777_215
    for profile, status, message in ((largest, 200, ""), (largest + "p", 400, "'profile' exceeds the maximum length")):
        body = {"run_id": run_id, "datasets": [{"dataset": {**DATASET, "profile": profile}}]}
        answer = http.post(f"{MLFLOW}/runs/log-inputs", json=body)
        assert (answer.status_code, message in answer.text) == (status, True)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("experiments/search-datasets", {}, "SearchDatasets request must specify at least one experiment_id."),
        ("experiments/search-datasets", {"experiment_ids": []}, "must specify at least one experiment_id."),
        ("experiments/search-datasets", {"experiment_ids": ["0"] * 21}, "SearchDatasets request cannot specify more than"),
        ("runs/log-inputs", {"datasets": []}, "Missing value for required parameter 'run_id'"),
        ("runs/log-inputs", {"run_id": "../x"}, "Invalid value \"../x\" for parameter 'run_id'"),
        ("runs/log-inputs", {"run_id": "RUN", "datasets": [{}]}, "required parameter 'datasets[0].dataset'"),
        ("runs/log-inputs", {"run_id": "RUN", "datasets": [{"dataset": {"name": "d"}}]}, "'datasets[0].dataset.digest'"),
        ("runs/log-inputs", {"run_id": "RUN", "datasets": [{"dataset": {**DATASET, "name": "n" * 501}}]}, "'name' exceeds"),
    ],
)
def test_a_refusal_names_the_parameter(http: TestClient, path: str, body: dict[str, Any], message: str) -> None:
    sent = {name: new_run(http) if value == "RUN" else value for name, value in body.items()}
    answer = http.post(f"{MLFLOW}/{path}", json=sent)
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert message in answer.json()["message"]


def test_logging_inputs_to_a_missing_run_is_refused(http: TestClient) -> None:
    body: dict[str, Any] = {"run_id": "none", "datasets": [{"dataset": DATASET}], "models": [{"model_id": "m-none"}]}
    answer = http.post(f"{MLFLOW}/runs/log-inputs", json=body)
    assert (answer.status_code, answer.json()["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")
    assert http.post(PATHS[0], json={"experiment_ids": ["0"]}).json() == {"dataset_summaries": []}


def test_model_id_of_another_server_is_stored_as_sent(http: TestClient) -> None:
    run_id = new_run(http)
    for path in ("log-inputs", "outputs"):
        body = {"run_id": run_id, "models": [{"model_id": "m-elsewhere"}]}
        assert http.post(f"{MLFLOW}/runs/{path}", json=body).json() == {}
    stored = http.get(f"{MLFLOW}/runs/get", params={"run_id": run_id}).json()["run"]
    assert stored["inputs"] == {"model_inputs": [{"model_id": "m-elsewhere"}]}
    assert stored["outputs"] == {"model_outputs": [{"model_id": "m-elsewhere", "step": 0}]}
