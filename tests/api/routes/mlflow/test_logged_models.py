"""Logged models on the wire, and their files: names and isolation as for runs."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

MLFLOW = "/api/2.0/mlflow"
MODELS = f"{MLFLOW}/logged-models"
PROXY = "/api/2.0/mlflow-artifacts/artifacts"


def new_model(http: TestClient, **fields: Any) -> dict[str, Any]:
    model: dict[str, Any] = http.post(MODELS, json={"experiment_id": "0", **fields}).json()["model"]
    return model


def new_run(http: TestClient) -> str:
    return str(http.post(f"{MLFLOW}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"])


def test_logged_model_is_created_finalized_and_deleted(http: TestClient) -> None:
    made = new_model(http, name="m", model_type="t", params=[{"key": "a", "value": "1"}], tags=[{"key": "b", "value": "2"}])
    model_id = made["info"]["model_id"]
    assert made["info"] == {
        "model_id": model_id,
        "experiment_id": "0",
        "name": "m",
        "creation_timestamp_ms": made["info"]["creation_timestamp_ms"],
        "last_updated_timestamp_ms": made["info"]["creation_timestamp_ms"],
        "artifact_uri": f"mlflow-artifacts:/0/models/{model_id}/artifacts",
        "status": "LOGGED_MODEL_PENDING",
        "model_type": "t",
        "source_run_id": "",
        "tags": [{"key": "b", "value": "2"}],
        "registrations": [],
    }
    assert made["data"] == {"params": [{"key": "a", "value": "1"}], "metrics": []}
    for status, stored in (
        ("LOGGED_MODEL_UPLOAD_FAILED", "UPLOAD_FAILED"),
        (2, "READY"),
        ("3", "UPLOAD_FAILED"),
        ("2", "READY"),
    ):
        finalized = http.patch(f"{MODELS}/{model_id}", json={"model_id": model_id, "status": status}).json()["model"]
        assert finalized["info"]["status"] == f"LOGGED_MODEL_{stored}"
    assert http.post(f"{MODELS}/{model_id}/params", json={"params": [{"key": "c", "value": "3"}]}).json() == {}
    tagged = http.patch(f"{MODELS}/{model_id}/tags", json={"tags": [{"key": "x/y", "value": "z"}]}).json()["model"]
    assert {tag["key"] for tag in tagged["info"]["tags"]} == {"b", "x/y"}
    assert http.delete(f"{MODELS}/{model_id}/tags/x/y").json() == {}
    assert http.get(f"{MODELS}/{model_id}").json()["model"]["data"]["params"][1] == {"key": "c", "value": "3"}
    assert http.request("DELETE", f"{MODELS}/{model_id}", json={"model_id": model_id}).json() == {}
    assert http.get(f"{MODELS}/{model_id}").json()["error_code"] == "RESOURCE_DOES_NOT_EXIST"
    assert http.get(f"{MODELS}/{model_id}", params={"allow_deleted": "true"}).json()["model"]["info"]["name"] == "m"
    assert http.post(f"{MODELS}/search", json={"experiment_ids": ["0"]}).json() == {"models": []}


def test_search_by_dataset_metrics_is_paginated(http: TestClient) -> None:
    run_id = new_run(http)
    for number, name in enumerate("abc"):
        model_id = new_model(http, name=name, source_run_id=run_id)["info"]["model_id"]
        on = {"dataset_name": "d", "dataset_digest": "2" if name == "b" else "1"}
        body = {"run_id": run_id, "key": "acc", "value": number, "timestamp": 1, "model_id": model_id, **on}
        assert http.post(f"{MLFLOW}/runs/log-metric", json=body).json() == {}
        batch = [{"key": "err", "value": "NaN", "timestamp": 1, "step": 2, "model_id": model_id}]
        assert http.post(f"{MLFLOW}/runs/log-batch", json={"run_id": run_id, "metrics": batch}).json() == {}
    search = {
        "experiment_ids": ["0"],
        "filter": "metrics.acc >= 0 AND source_run_id = '" + run_id + "'",
        "datasets": [{"dataset_name": "d"}],
        "order_by": [{"field_name": "metrics.acc", "ascending": False, "dataset_name": "d"}],
        "max_results": 2,
    }
    first = http.post(f"{MODELS}/search", json=search).json()
    second = http.post(f"{MODELS}/search", json={**search, "page_token": first["next_page_token"]}).json()
    assert [model["info"]["name"] for model in [*first["models"], *second["models"]]] == ["c", "b", "a"]
    assert "next_page_token" not in second
    by_digest = {**search, "order_by": [{"field_name": "metrics.acc", "ascending": False, "dataset_digest": "2"}]}
    assert http.post(f"{MODELS}/search", json=by_digest).json()["models"][0]["info"]["name"] == "b"
    model_id = second["models"][0]["info"]["model_id"]
    on = {"dataset_name": "d", "dataset_digest": "1"}
    assert second["models"][0]["data"]["metrics"] == [
        {"key": "acc", "value": 0.0, "timestamp": 1, "step": 0, **on, "model_id": model_id, "run_id": run_id},
        {"key": "err", "value": "NaN", "timestamp": 1, "step": 2, "model_id": model_id, "run_id": run_id},
    ]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"filter": "source_run_id != 'RUN'"}, ["b", "a"]),
        ({"filter": "source_run_id NOT IN ('RUN')"}, ["b", "a"]),
        ({"filter": "source_run_id = ''"}, ["b", "a"]),
        ({"filter": "source_run_id IN ('', 'RUN')"}, ["c", "b", "a"]),
        ({"filter": "source_run_id LIKE '%'"}, ["c", "b", "a"]),
        ({"filter": "source_run_id = 'RUN'"}, ["c"]),
        ({"order_by": [{"field_name": "source_run_id"}]}, ["b", "a", "c"]),
        ({"order_by": [{"field_name": "source_run_id", "ascending": False}]}, ["c", "b", "a"]),
        ({"order_by": [{"field_name": "status"}]}, ["b", "a", "c"]),
    ],
    ids=lambda value: str(value),
)
def test_model_without_run_has_an_empty_source_run_id(http: TestClient, asked: dict[str, Any], found: list[str]) -> None:
    run_id = new_run(http)
    made = [new_model(http, name=name, source_run_id=run_id if name == "c" else "")["info"]["model_id"] for name in "abc"]
    for model_id, status in zip(made, ("READY", "PENDING", "UPLOAD_FAILED"), strict=True):
        http.patch(f"{MODELS}/{model_id}", json={"model_id": model_id, "status": f"LOGGED_MODEL_{status}"})
    asked = json.loads(json.dumps({"experiment_ids": ["0"], **asked}).replace("RUN", run_id))
    pages, token = [], ""
    while token is not None:
        page = http.post(f"{MODELS}/search", json={**asked, "max_results": 1, "page_token": token}).json()
        pages += [model["info"]["name"] for model in page["models"]]
        token = page.get("next_page_token")
    assert pages == found


def test_search_omits_metrics_when_include_metrics_is_false(http: TestClient) -> None:
    run_id = new_run(http)
    model_id = new_model(http, name="a", params=[{"key": "p", "value": "1"}])["info"]["model_id"]
    body = {"run_id": run_id, "key": "acc", "value": 1, "timestamp": 1, "model_id": model_id}
    assert http.post(f"{MLFLOW}/runs/log-metric", json=body).json() == {}
    for asked, kept in (({}, True), ({"include_metrics": None}, True), ({"includeMetrics": False}, False)):
        found = http.post(f"{MODELS}/search", json={"experiment_ids": ["0"], **asked}).json()["models"][0]
        assert ("metrics" in found["data"]) is kept and found["data"]["params"] == [{"key": "p", "value": "1"}]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("", {}, "Missing value for required parameter 'experiment_id'"),
        ("", {"experiment_id": "0", "name": "a/b"}, "Invalid model name ('a/b') provided"),
        ("/search", {}, "Missing value for required parameter 'experiment_ids'"),
        (
            "/search",
            {"experiment_ids": ["0"], "datasets": [{}]},
            "`dataset_name` in the `datasets` clause must be specified.",
        ),
        ("/search", {"experiment_ids": ["0"], "include_metrics": "false"}, "'include_metrics'"),
        ("/search", {"experiment_ids": ["0"], "include_metrics": 0}, "'include_metrics'"),
        ("/search", {"experiment_ids": ["0"], "filter": "x.y = 1"}, "Invalid entity type 'x'"),
        ("/search", {"experiment_ids": ["0"], "order_by": [{"field_name": "x"}]}, "Invalid order by field name: x"),
        ("/search", {"experiment_ids": ["0"], "page_token": "x"}, "Invalid page token"),
    ],
)
def test_a_refusal_names_the_parameter(http: TestClient, path: str, body: dict[str, Any], message: str) -> None:
    answer = http.post(f"{MODELS}{path}", json=body)
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert message in answer.json()["message"]


def test_requests_for_a_missing_model_answer_404_and_change_nothing(http: TestClient) -> None:
    run_id = new_run(http)
    metric = {"run_id": run_id, "key": "acc", "value": 1, "timestamp": 1, "model_id": "m-none"}
    for method, path, body in (
        ("GET", f"{MODELS}/m-none", None),
        ("PATCH", f"{MODELS}/m-none", {"status": "LOGGED_MODEL_READY"}),
        ("DELETE", f"{MODELS}/m-none", None),
        ("PATCH", f"{MODELS}/m-none/tags", {"tags": []}),
        ("POST", f"{MODELS}/m-none/params", {"params": []}),
        ("GET", f"{MODELS}/m-none/artifacts/directories", None),
        ("GET", f"{MODELS}/m-none/artifacts/files?artifact_file_path=x", None),
        ("PUT", f"{PROXY}/0/models/m-none/artifacts/x", None),
        ("POST", f"{MLFLOW}/runs/log-metric", metric),
    ):
        answer = http.request(method, path, json=body)
        assert (answer.status_code, answer.json()["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST"), path
    assert http.get(f"{MLFLOW}/runs/get", params={"run_id": run_id}).json()["run"]["data"]["metrics"] == []


def test_model_files_are_uploaded_listed_and_downloaded(http: TestClient) -> None:
    model = new_model(http)["info"]
    model_id = model["model_id"]
    root = f"0/models/{model_id}/artifacts"
    assert http.put(f"{PROXY}/{root}/data/model.pkl", content=b"weights").json() == {}
    assert http.put(f"{PROXY}/{root}/MLmodel", content=b"flavors").json() == {}
    assert http.get(f"{PROXY}/{root}/data/model.pkl").content == b"weights"
    assert http.get(PROXY, params={"path": root}).json()["files"] == [
        {"path": "MLmodel", "is_dir": False, "file_size": 7},
        {"path": "data", "is_dir": True},
    ]
    listed = http.get(f"{MODELS}/{model_id}/artifacts/directories", params={"artifact_directory_path": "data"}).json()
    assert listed["files"] == [{"path": "data/model.pkl", "is_dir": False, "file_size": 7}]
    assert listed["root_uri"] == model["artifact_uri"]
    for asked in ("", "?artifact_file_path="):
        refused = http.get(f"{MODELS}/{model_id}/artifacts/files{asked}")
        assert (refused.status_code, refused.json()) == (
            400,
            {
                "error_code": "BAD_REQUEST",
                "message": 'Request must include the "artifact_file_path" query parameter.',
            },
        )
    shown = http.get(f"/ajax-api/2.0/mlflow/logged-models/{model_id}/artifacts/files?artifact_file_path=MLmodel")
    assert (shown.content, shown.headers["x-content-type-options"]) == (b"flavors", "nosniff")
    assert http.delete(f"{PROXY}/{root}/data").json() == {}
    http.delete(f"{MODELS}/{model_id}")
    assert http.put(f"{PROXY}/{root}/late", content=b"x").status_code == 404
    assert http.get(f"{PROXY}/{root}/MLmodel").content == b"flavors"


@pytest.mark.parametrize("climb", ["..%2f..%2fsecret", "%2e%2e/x", "a%00b", "%252e%252e/x", "a%5cb", "a%23b", "%2fetc"])
def test_path_traversal_never_leaves_the_model_folder(http: TestClient, climb: str) -> None:
    model_id = new_model(http)["info"]["model_id"]
    for method in ("PUT", "GET", "DELETE"):
        answer = http.request(method, f"{PROXY}/0/models/{model_id}/artifacts/{climb}", content=b"x")
        assert answer.status_code in (400, 404)
    for path in (f"artifacts/files?artifact_file_path={climb}", f"artifacts/directories?artifact_directory_path={climb}"):
        answer = http.get(f"{MODELS}/{model_id}/{path}")
        assert answer.json() == {"error_code": "INVALID_PARAMETER_VALUE", "message": "Invalid path"}
    assert http.get(PROXY, params={"path": f"0/models/{model_id}/artifacts"}).json()["files"] == []


def test_model_files_are_found_only_below_their_experiment(http: TestClient) -> None:
    model_id = new_model(http)["info"]["model_id"]
    for place in (f"1/models/{model_id}/artifacts/x", f"0/{model_id}/artifacts/x", f"0/models/{model_id}/x"):
        assert http.put(f"{PROXY}/{place}", content=b"x").status_code == 404


def test_registering_a_version_tags_its_logged_model(http: TestClient) -> None:
    model = new_model(http, name="m")["info"]
    http.put(f"{PROXY}/0/models/{model['model_id']}/artifacts/MLmodel", content=b"x")
    http.post(f"{MLFLOW}/registered-models/create", json={"name": "doors"})
    version = {"name": "doors", "source": f"models:/{model['model_id']}", "model_id": model["model_id"]}
    made = http.post(f"{MLFLOW}/model-versions/create", json=version)
    assert made.status_code == 200, made.text
    found = http.get(f"{MODELS}/{model['model_id']}").json()["model"]["info"]
    assert found["registrations"] == [{"name": "doors", "version": made.json()["model_version"]["version"]}]
    assert found["tags"] == [{"key": "mlflow.modelVersions", "value": '[{"name": "doors", "version": 1}]'}]
    mine = {"tags": [{"key": "mlflow.modelVersions", "value": "[]"}, {"key": "b", "value": "c"}]}
    http.patch(f"{MODELS}/{model['model_id']}/tags", json=mine)
    http.post(f"{MLFLOW}/model-versions/create", json=version)
    tags = {tag["key"]: tag["value"] for tag in http.get(f"{MODELS}/{model['model_id']}").json()["model"]["info"]["tags"]}
    both = '[{"name": "doors", "version": 1}, {"name": "doors", "version": 2}]'
    assert tags == {"b": "c", "mlflow.modelVersions": both}


def test_log_model_of_older_clients_appends_to_the_history_tag(http: TestClient) -> None:
    run_id = new_run(http)
    flavors = {"python_function": {"loader_module": "x", "config": {"big": 1}}, "other": "text"}
    entry = {"run_id": run_id, "artifact_path": "model", "utc_time_created": "now", "model_uuid": "u"}
    for _ in range(2):
        model_json = json.dumps({**entry, "flavors": flavors, "signature": "left out"})
        assert http.post(f"{MLFLOW}/runs/log-model", json={"run_id": run_id, "model_json": model_json}).json() == {}
    tags = http.get(f"{MLFLOW}/runs/get", params={"run_id": run_id}).json()["run"]["data"]["tags"]
    [history] = [json.loads(tag["value"]) for tag in tags if tag["key"] == "mlflow.log-model.history"]
    assert history == [{**entry, "flavors": {"python_function": {"loader_module": "x"}, "other": "text"}}] * 2
    for bad, message in (
        ("{", "Malformed model info."),
        ("{}", "missing mandatory fields: artifact_path, flavors"),
        ("[1]", ""),
    ):
        answer = http.post(f"{MLFLOW}/runs/log-model", json={"run_id": run_id, "model_json": bad})
        assert answer.status_code == 400
        assert message in answer.json()["message"]
