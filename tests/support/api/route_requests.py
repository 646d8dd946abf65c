"""A valid request for every route, for tests of permissions."""

import re
from typing import Any

from tests.api.auth.conftest import MLFLOW

Request = tuple[str, str, dict[str, Any]]


def asked(method: str, path: str, **options: Any) -> Request:
    return method, path, options


def json(path: str, method: str = "POST", /, **body: Any) -> Request:
    return method, path, {"json": body}


def query(path: str, /, **params: Any) -> Request:
    return "GET", path, {"params": params}


M = MLFLOW

POINT = {"key": "k", "value": 1.0, "timestamp": 1}

TWICE = '"{\\"run_id\\": \\"{run}\\", \\"run_name\\": \\"n\\"}"'

"""A body that is JSON-encoded twice."""

PROMPT = {
    "prompt_template": "Say {{ word }}",
    "prompt_parameters": [{"key": "word", "value": "ahoy"}],
    "model_route": "route",
    "model_input": "Say ahoy",
    "mlflow_version": "3.17.2",
}

PART = {"part_number": 1, "etag": "e"}

REQUESTS: list[Request] = [
    query(f"{M}/experiments/get", experiment_id="{experiment}"),
    json(f"{M}/experiments/set-experiment-tag", experiment_id="{experiment}", key="k", value="v"),
    json(f"{M}/experiments/delete-experiment-tag", experiment_id="{experiment}", key="k"),
    json(f"{M}/experiments/update", experiment_id="{experiment}", new_name="shared name"),
    json(f"{M}/runs/create", experiment_id="{experiment}"),
    json(f"{M}/runs/create-promptlab-run", experiment_id="{experiment}", **PROMPT),
    query(f"{M}/runs/get", run_id="{run}"),
    query(f"{M}/runs/get", run_uuid="{run}"),
    query("/ajax-api/2.0/mlflow/runs/get", run_id="{run}"),
    json(f"{M}/runs/update", run_id="{run}", run_name="n"),
    asked("POST", f"{M}/runs/update", content=TWICE, headers={"Content-Type": "application/json"}),
    json(f"{M}/runs/log-metric", run_id="{run}", **POINT),
    json(f"{M}/runs/log-metric", run_uuid="{run}", **POINT),
    json(f"{M}/runs/log-metric", run_id="{run}", key="k", value=1.0, timestamp=1, step="1"),
    json(f"{M}/runs/log-parameter", run_id="{run}", key="p", value="v"),
    json(f"{M}/runs/log-parameter", run_uuid="{run}", key="p", value="v"),
    json(f"{M}/runs/log-batch", run_id="{run}", metrics=[POINT], params=[{"key": "q", "value": "v"}], tags=[]),
    json(f"{M}/runs/log-batch", run_uuid="{run}", metrics=[POINT]),
    json(f"{M}/runs/set-tag", run_id="{run}", key="t", value="v"),
    json(f"{M}/runs/set-tag", run_uuid="{run}", key="t", value="v"),
    json(f"{M}/runs/delete-tag", run_id="{run}", key="t"),
    json(f"{M}/runs/log-inputs", run_id="{run}", datasets=[]),
    json(f"{M}/runs/outputs", run_id="{run}", models=[{"model_id": "{logged_model}", "step": 1}]),
    query(f"{M}/artifacts/list", run_id="{run}"),
    query(f"{M}/metrics/get-history", run_id="{run}", metric_key="loss"),
    query(f"{M}/metrics/get-history-bulk-interval", run_ids=["{run}"], metric_key="loss"),
    query("/get-artifact", run_uuid="{run}", path="notes.txt"),
    query(f"{M}/artifacts/get", run_id="{run}", path="notes.txt"),
    query("/api/2.0/mlflow-artifacts/artifacts", path="{experiment}/{run}/artifacts"),
    query("/api/2.0/mlflow-artifacts/artifacts", path="{experiment}/{run}"),
    query("/api/2.0/mlflow-artifacts/artifacts", path="{experiment}"),
    query(f"{M}/metrics/get-history-bulk", run_id=["{run}"], metric_key="loss"),
    json(f"{M}/artifacts/presigned-download-url", run_id="{run}", path="notes.txt"),
    json(f"{M}/artifacts/presigned-upload-url", run_id="{run}", path="notes.txt"),
    asked("GET", "/api/2.0/mlflow-artifacts/presigned/{file}"),
    json("/api/2.0/mlflow-artifacts/mpu/create/{experiment}/{run}/artifacts", path="f"),
    json("/api/2.0/mlflow-artifacts/mpu/complete/{experiment}/{run}/artifacts", path="f", upload_id="u", parts=[PART]),
    json("/api/2.0/mlflow-artifacts/mpu/abort/{experiment}/{run}/artifacts", path="f", upload_id="u"),
    asked("POST", "/ajax-api/2.0/mlflow/upload-artifact?run_uuid={run}&path=u.txt", content=b"x"),
    asked("GET", "/api/2.0/mlflow-artifacts/artifacts/{file}"),
    asked("PUT", "/api/2.0/mlflow-artifacts/artifacts/{experiment}/{run}/artifacts/new.txt", content=b"x"),
    asked("GET", f"{M}/logged-models/{{logged_model}}"),
    asked("GET", f"{M}/logged-models/{{logged_model}}/artifacts/directories"),
    query(f"{M}/logged-models/{{logged_model}}/artifacts/files", artifact_file_path="f"),
    json(f"{M}/logged-models/{{logged_model}}/params", params=[{"key": "p", "value": "v"}]),
    json(f"{M}/runs/log-model", run_id="{run}", model_json='{"artifact_path": "m"}'),
    json(f"{M}/logged-models", experiment_id="{experiment}", name="n"),
    json(f"{M}/logged-models/{{logged_model}}/tags", "PATCH", tags=[{"key": "a", "value": "b"}]),
    json(f"{M}/logged-models/{{logged_model}}", "PATCH", status="LOGGED_MODEL_READY"),
    query(f"{M}/registered-models/get", name="{model}"),
    query(f"{M}/registered-models/get-latest-versions", name="{model}"),
    json(f"{M}/registered-models/get-latest-versions", name="{model}"),
    json(f"{M}/registered-models/update", "PATCH", name="{model}", description="d"),
    json(f"{M}/registered-models/set-tag", name="{model}", key="k", value="v"),
    json(f"{M}/registered-models/alias", name="{model}", alias="champion", version="1"),
    query(f"{M}/registered-models/alias", name="{model}", alias="champion"),
    query(f"{M}/model-versions/get", name="{model}", version="1"),
    query(f"{M}/model-versions/get-download-uri", name="{model}", version="1"),
    json(f"{M}/model-versions/update", "PATCH", name="{model}", version="1", description="d"),
    json(f"{M}/model-versions/set-tag", name="{model}", version="1", key="k", value="v"),
    json(f"{M}/model-versions/transition-stage", name="{model}", version="1", stage="Staging"),
    asked("GET", "/v1/experiments/{experiment}"),
    asked("GET", "/v1/experiments/{experiment}/runs"),
    asked("GET", "/v1/experiments/{experiment}/runs/{run}"),
    json("/v1/runs", experiment_id="{experiment}"),
    asked("GET", "/v1/runs/{run}"),
    query("/v1/runs/compare", ids="{run},{run}"),
    query("/v1/runs/compare", ids=["{run}", "{run}"]),
    json("/v1/runs/{run}/metrics", metrics=[{"key": "k", "value": 1}]),
    json("/v1/runs/{run}/params", params={"other": "v"}),
    asked("POST", "/v1/runs/{run}/artifacts?key=b.txt", content=b"x"),
    json("/v1/runs/{run}/status", "PATCH", status="running"),
    asked("GET", "/v1/datasets/{dataset}"),
    asked("GET", "/v1/datasets/{dataset}/preview"),
    asked("GET", "/v1/datasets/{dataset}/checks"),
    asked("POST", "/v1/datasets/{dataset}/checks"),
    asked("GET", "/v1/datasets/{dataset}/report"),
    asked("GET", "/v1/datasets/{dataset}/lineage"),
    asked("GET", "/v1/datasets/{dataset}/download"),
    query("/v1/datasets/{dataset}/diff", against="{dataset}"),
    json("/v1/datasets/{dataset}", "PATCH", tags=["seen"]),
    json("/v1/datasets/{dataset}/prepare", name="prepared"),
    asked("DELETE", "/v1/datasets/{dataset}"),
    asked("GET", "/v1/jobs/{job}"),
    asked("GET", "/v1/jobs/{job}/logs?follow=false"),
    asked("GET", "/v1/hpo/{sweep}"),
    asked("GET", "/v1/hpo/{sweep}/trials"),
    asked("GET", "/v1/runs/{run}/replay"),
    asked("POST", "/v1/runs/{run}/replay"),
    asked("GET", "/v1/models/{model}/versions"),
    asked("GET", "/v1/models/{model}/versions/1"),
    asked("GET", "/v1/models/{model}/versions/1/data"),
    asked("GET", "/v1/models/{model}/versions/1/proof"),
    json("/v1/models/{model}/versions/1/stage", "PUT", stage="staging"),
    query("/model-versions/get-artifact", name="{model}", version="1", path="notes.txt"),
    asked("GET", "/api/2.0/mlflow-artifacts/artifacts/models/{model}/1/notes.txt"),
    json("/v1/models/{model}/versions/1/stage", "PATCH", stage="production"),
    asked("DELETE", "/v1/models/{model}/deployment"),
    json("/v1/models/{model}/versions/1/stage", "PATCH", stage="staging"),
    asked("DELETE", "/api/2.0/mlflow-artifacts/artifacts/{experiment}/{run}/artifacts/new.txt"),
    json(f"{M}/registered-models/alias", "DELETE", name="{model}", alias="champion"),
    asked("POST", "/v1/jobs/{job}/cancel"),
    asked("POST", "/v1/jobs/{job}/resume"),
    asked("POST", "/v1/jobs/{job}/cancel"),
    asked("DELETE", "/v1/jobs/{job}"),
    asked("POST", "/v1/hpo/{sweep}/cancel"),
    json(f"{M}/runs/delete", run_id="{run}"),
    json(f"{M}/runs/restore", run_id="{run}"),
    asked("DELETE", "/v1/runs/{run}"),
    json(f"{M}/runs/restore", run_id="{run}"),
    json(f"{M}/experiments/delete", experiment_id="{experiment}"),
    json(f"{M}/experiments/restore", experiment_id="{experiment}"),
    asked("DELETE", "/v1/experiments/{experiment}"),
    json(f"{M}/experiments/restore", experiment_id="{experiment}"),
]

REMOVALS: list[Request] = [
    json(f"{M}/logged-models/{{logged_model}}/tags/a", "DELETE"),
    json(f"{M}/logged-models/{{logged_model}}", "DELETE"),
    json(f"{M}/model-versions/delete-tag", "DELETE", name="{model}", version="1", key="k"),
    json(f"{M}/model-versions/delete", "DELETE", name="{model}", version="1"),
    json(f"{M}/registered-models/delete-tag", "DELETE", name="{model}", key="k"),
    json(f"{M}/registered-models/delete", "DELETE", name="{model}"),
]

"""Irreversible requests run on objects that no other request needs."""


def filled(value: Any, ids: dict[str, str]) -> Any:
    if isinstance(value, str):
        for name, text in ids.items():
            value = value.replace(f"{{{name}}}", text)
        return value
    if isinstance(value, dict):
        return {key: filled(each, ids) for key, each in value.items()}
    return [filled(each, ids) for each in value] if isinstance(value, list) else value


NOBODYS = {
    "experiment": "999999",
    "run": "0" * 32,
    "file": f"999999/{'0' * 32}/artifacts/notes.txt",
    "logged_model": "m-" + "0" * 32,
    "model": "no-such-model",
    "dataset": "no-such-dataset",
    "job": "no-such-job",
    "sweep": "no-such-sweep",
}


def without_names(path: str) -> str:
    """Return a request's path with a placeholder value per name, as routes are matched."""
    return re.sub(r"\{\w+\}", "1", path.replace("{file}", "1/1/artifacts/f").partition("?")[0])


def first_of_its_mirrors(shape: str) -> str:
    return shape.replace(" /ajax-api/", " /api/").replace(" /api/v1/", " /v1/").replace("2.0mlflow", "2.0/mlflow")
