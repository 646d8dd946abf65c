"""The registry on the wire: required sources, limits, error formats, and omitted fields."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from recipes.storage.artifact_store import Store
from resources.settings.settings import Settings

MODELS = "/api/2.0/mlflow/registered-models"
VERSIONS = "/api/2.0/mlflow/model-versions"


@pytest.fixture
def registry(http: TestClient) -> Iterator[TestClient]:
    assert http.post(f"{MODELS}/create", json={"name": "m"}).status_code == 200
    yield http


@pytest.fixture
def run_id(http: TestClient) -> str:
    run_id = str(http.post("/api/2.0/mlflow/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"])
    assert http.put(f"/api/2.0/mlflow-artifacts/artifacts/0/{run_id}/artifacts/model/MLmodel", content=b"x").is_success
    return run_id


def create(http: TestClient, source: str, **more: Any) -> Any:
    return http.post(f"{VERSIONS}/create", json={"name": "m", "source": source, **more})


def check_refused(answer: Any, code: str = "INVALID_PARAMETER_VALUE", status: int = 400) -> str:
    body = answer.json()
    assert (answer.status_code, body["error_code"], set(body)) == (status, code, {"error_code", "message"}), body
    assert "\n" not in body["message"]
    return str(body["message"])


NOT_CONTAINED = "request parameter must identify the resource that contains the source"
ABSENT = "There is nothing at that place"


@pytest.mark.parametrize("source", ["mlflow-artifacts:/0/RUN/artifacts/model", "runs:/RUN/model", "runs:/RUN"])
def test_source_in_a_run_requires_its_run_id(registry: TestClient, run_id: str, source: str) -> None:
    assert NOT_CONTAINED in check_refused(create(registry, source.replace("RUN", run_id)))
    answer = create(registry, source.replace("RUN", run_id), run_id=run_id)
    assert answer.status_code == 200, answer.text


def test_run_of_another_tracking_server_is_accepted_as_source_unresolved(registry: TestClient) -> None:
    assert create(registry, "runs:/elsewhere/model", run_id="elsewhere").status_code == 200
    uri = registry.get(f"{VERSIONS}/get-download-uri", params={"name": "m", "version": "1"}).json()["artifact_uri"]
    assert uri == "runs:/elsewhere/model"


def test_a_source_in_the_store_is_served_by_the_proxy(registry: TestClient, settings: Settings) -> None:
    Store(settings.store).put_bytes("s3://hanzo-models/other/v1/adapter/weights.bin", b"w")
    assert create(registry, "s3://hanzo-models/other/v1/adapter").status_code == 200
    uri = registry.get(f"{VERSIONS}/get-download-uri", params={"name": "m", "version": "1"}).json()["artifact_uri"]
    assert uri == "mlflow-artifacts:/models/m/1"
    proxy = "/api/2.0/mlflow-artifacts/artifacts"
    listed = registry.get(proxy, params={"path": "models/m/1"}).json()["files"]
    assert listed == [{"path": "weights.bin", "is_dir": False, "file_size": 1}]
    answer = registry.get(f"{proxy}/models/m/1/weights.bin")
    assert (answer.content, answer.headers["x-content-type-options"]) == (b"w", "nosniff")
    for climb in ("..%2f..%2fv2%2fsecret", "x%23y", "absent", "weights.bin/absent"):
        assert registry.get(f"{proxy}/models/m/1/{climb}").status_code in (400, 404)
    for path in ("models/m/1/..", "models/m", "models/m/2", "models/nobody/1"):
        assert registry.get(proxy, params={"path": path}).status_code in (400, 404)
    assert registry.put(f"{proxy}/models/m/1/weights.bin", content=b"evil").status_code in (400, 404, 405)
    assert registry.get(f"{proxy}/models/m/1/weights.bin").content == b"w"


def test_version_copied_from_a_version_keeps_run_and_model(registry: TestClient, run_id: str) -> None:
    create(registry, f"runs:/{run_id}/model", run_id=run_id)
    for source in ("models:/m/1", "models:/m/latest", "models:/m/None"):
        made = create(registry, source).json()["model_version"]
        assert made["run_id"] == run_id and made["source"].startswith("models:/m/")
    assert "must match the referenced model version" in check_refused(create(registry, "models:/m/1", run_id="other"))
    check_refused(create(registry, "models:/m/99"), "RESOURCE_DOES_NOT_EXIST", 404)
    check_refused(create(registry, "models:/m@nobody"))
    uri = registry.get(f"{VERSIONS}/get-download-uri", params={"name": "m", "version": "4"}).json()["artifact_uri"]
    assert uri == f"runs:/{run_id}/model"


def test_version_of_a_logged_model_keeps_model_id_and_run_id(registry: TestClient, run_id: str) -> None:
    body = {"experiment_id": "0", "name": "net", "source_run_id": run_id}
    model_id = registry.post("/api/2.0/mlflow/logged-models", json=body).json()["model"]["info"]["model_id"]
    made = create(registry, f"models:/{model_id}", model_id=model_id).json()["model_version"]
    assert (made["model_id"], made["run_id"]) == (model_id, run_id)
    root = f"mlflow-artifacts:/0/models/{model_id}/artifacts"
    uri = registry.get(f"{VERSIONS}/get-download-uri", params={"name": "m", "version": "1"}).json()["artifact_uri"]
    assert uri == root
    assert create(registry, f"{root}/deep", model_id=model_id).status_code == 200
    for source in (f"{root}x", "mlflow-artifacts:/0/models/m-other/artifacts", f"runs:/{run_id}/model"):
        assert NOT_CONTAINED in check_refused(create(registry, source, model_id=model_id))
    assert NOT_CONTAINED in check_refused(create(registry, "models:/m-other", model_id="m-other"))


def test_source_path_in_a_run_resolves_to_the_logged_model_of_that_name(registry: TestClient, run_id: str) -> None:
    """MLflow 3 stores the files of `log_model(name="net")` separately, not in the run."""
    body = {"experiment_id": "0", "name": "net", "source_run_id": run_id}

    def logged(**more: str) -> str:
        made = registry.post("/api/2.0/mlflow/logged-models", json={**body, **more}).json()["model"]["info"]["model_id"]
        place = f"/api/2.0/mlflow-artifacts/artifacts/0/models/{made}/artifacts/deep/w"
        assert registry.put(place, content=b"w").is_success
        return str(made)

    source = f"runs:/{run_id}/net"
    registry.post("/api/2.0/mlflow/logged-models", json={**body, "name": "empty"})
    other = str(registry.post("/api/2.0/mlflow/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"])
    logged(source_run_id=other)
    for absent in (source, f"runs:/{run_id}/empty"):
        assert ABSENT in check_refused(create(registry, absent, run_id=run_id))
    model_id = logged()
    for named in (source, f"{source}/deep"):
        made = create(registry, named, run_id=run_id).json()["model_version"]
        assert (made["source"], made["run_id"], made["model_id"]) == (named, run_id, model_id)
    logged()
    create(registry, "models:/m/2")
    root = f"mlflow-artifacts:/0/models/{model_id}/artifacts"
    for number, place, path in (("1", root, "deep/w"), ("2", f"{root}/deep", "w"), ("3", f"{root}/deep", "w")):
        version = {"name": "m", "version": number}
        assert registry.get(f"{VERSIONS}/get-download-uri", params=version).json()["artifact_uri"] == place
        assert registry.get("/model-versions/get-artifact", params={**version, "path": path}).content == b"w"
    assert NOT_CONTAINED in check_refused(create(registry, source))
    assert ABSENT in check_refused(create(registry, f"{source}/absent", run_id=run_id))
    assert ABSENT in check_refused(create(registry, f"mlflow-artifacts:/0/{run_id}/artifacts/net", run_id=run_id))
    assert registry.delete(f"/api/2.0/mlflow/logged-models/{model_id}").is_success
    again = create(registry, source, run_id=run_id).json()["model_version"]
    assert again["model_id"] != model_id, "the one that is left"
    assert registry.delete(f"/api/2.0/mlflow/logged-models/{again['model_id']}").is_success
    assert ABSENT in check_refused(create(registry, source, run_id=run_id))


def test_unset_fields_are_left_out(registry: TestClient, run_id: str) -> None:
    model = registry.get(f"{MODELS}/get", params={"name": "m"}).json()["registered_model"]
    assert set(model) == {"name", "creation_timestamp", "last_updated_timestamp"}
    version = create(registry, f"runs:/{run_id}/model", run_id=run_id).json()["model_version"]
    assert version.pop("creation_timestamp") == version.pop("last_updated_timestamp")
    assert version == {
        "name": "m",
        "version": "1",
        "user_id": "local",
        "current_stage": "None",
        "description": "",
        "source": f"runs:/{run_id}/model",
        "run_id": run_id,
        "status": "READY",
        "run_link": "",
    }


def test_duplicate_name_refusal_says_whether_a_model_or_a_prompt_has_it(registry: TestClient) -> None:
    prompt = {"tags": [{"key": "mlflow.prompt.is_prompt", "value": "true"}]}
    assert registry.post(f"{MODELS}/create", json={"name": "p", **prompt}).status_code == 200
    for body, message in (
        ({"name": "m"}, "Registered Model (name=m) already exists."),
        ({"name": "p", **prompt}, "Prompt (name=p) already exists."),
        (
            {"name": "p"},
            "Tried to create a registered model with name 'p', but the name is already taken by a prompt. MLflow",
        ),
        (
            {"name": "m", **prompt},
            "a prompt with name 'm', but the name is already taken by a registered model. MLflow does",
        ),
    ):
        refusal = check_refused(registry.post(f"{MODELS}/create", json=body), "RESOURCE_ALREADY_EXISTS")
        assert message in refusal, body


def test_prompt_with_file_source_is_refused(registry: TestClient) -> None:
    prompt = {"tags": [{"key": "mlflow.prompt.is_prompt", "value": "true"}]}
    message = check_refused(create(registry, "s3://b/x", **prompt))
    assert "Invalid model version source" in message and "Invalid prompt source" in message
    assert create(registry, "dummy-source", **prompt).status_code == 200
    assert "cannot be used as model version sources" in check_refused(create(registry, "models:/m/1"))
    text = {"tags": [*prompt["tags"], {"key": "mlflow.prompt.text", "value": "a" * 100_001}]}
    assert check_refused(create(registry, "dummy-source", **text)) == "Prompt text exceeds max length of 100000 characters."


@pytest.mark.parametrize(
    ("asked", "found"),
    [("run_id != 'x'", 1), ("run_id NOT IN ('x')", 1), ("run_id = ''", 1), ("run_id LIKE '%'", 1), ("run_id = 'x'", 0)],
)
def test_version_without_run_has_an_empty_run_id(registry: TestClient, asked: str, found: int) -> None:
    assert create(registry, "dummy-source", tags=[{"key": "mlflow.prompt.is_prompt", "value": "true"}]).status_code == 200
    search = registry.get(f"{VERSIONS}/search", params={"filter": f"{asked} AND tags.`mlflow.prompt.is_prompt` = 'true'"})
    assert [version["run_id"] for version in search.json().get("model_versions", [])] == [""] * found


REFUSALS: list[tuple[str, str, dict[str, Any], str]] = [
    ("POST", "registered-models/create", {}, "Missing value for required parameter 'name'"),
    ("POST", "registered-models/create", {"name": " "}, "Missing value for required parameter 'name'"),
    ("POST", "registered-models/create", {"name": "a/b"}, "Names cannot contain '/' or ':'"),
    ("POST", "registered-models/create", {"name": "a:b"}, "Names cannot contain '/' or ':'"),
    ("POST", "registered-models/create", {"name": ".."}, "must not resolve to other names"),
    ("POST", "registered-models/create", {"name": "x" * 251}, "'name' exceeds the maximum length of 250"),
    ("POST", "registered-models/create", {"name": "x\u0000"}, "cannot be stored"),
    ("POST", "registered-models/create", {"name": "x", "tags": [{"value": "v"}]}, "'tags[0].key'"),
    ("POST", "registered-models/create", {"name": "x", "description": "x" * 5001}, "'description' exceeds"),
    ("POST", "registered-models/rename", {"name": "m", "new_name": ""}, "required parameter 'new_name'"),
    ("POST", "registered-models/set-tag", {"name": "m", "key": "../x", "value": "v"}, "for parameter 'key'"),
    ("POST", "registered-models/set-tag", {"name": "m", "key": "x" * 251}, "'key' exceeds the maximum length of 250"),
    ("POST", "registered-models/set-tag", {"name": "m", "key": "k", "value": "x" * 100_001}, "'value' exceeds the max"),
    ("POST", "registered-models/alias", {"name": "m", "alias": "latest", "version": "1"}, "'latest' alias name"),
    ("POST", "registered-models/alias", {"name": "m", "alias": "v1", "version": "1"}, "alias name 'v1' is reserved"),
    ("POST", "registered-models/alias", {"name": "m", "alias": "a b", "version": "1"}, "Invalid alias name: 'a b'"),
    ("POST", "registered-models/alias", {"name": "m", "alias": "a" * 256, "version": "1"}, "maximum length of 255"),
    ("POST", "registered-models/alias", {"name": "m", "alias": "a", "version": "x"}, "must be an integer, got 'x'"),
    ("POST", "registered-models/alias", {"name": "m", "alias": "a", "version": ""}, "required parameter 'version'"),
    ("POST", "registered-models/get-latest-versions", {"name": "m", "stages": ["x"]}, "Invalid Model Version stage: x."),
    ("POST", "model-versions/set-tag", {"name": "m", "version": "1.5", "key": "k"}, "must be an integer, got '1.5'"),
    ("POST", "model-versions/transition-stage", {"name": "m", "version": "1"}, "required parameter 'stage'"),
    (
        "POST",
        "model-versions/transition-stage",
        {"name": "m", "version": "1", "stage": "Staging", "archive_existing_versions": "true"},
        "for parameter 'archive_existing_versions'",
    ),
    ("GET", "registered-models/search", {"max_results": "1001"}, "'max_results'"),
    ("GET", "registered-models/search", {"filter": "creation_time > 1"}, "Invalid attribute key 'creation_time'"),
    ("GET", "registered-models/search", {"filter": "run.x = 'y'"}, "Invalid entity type 'run'"),
    ("GET", "registered-models/search", {"order_by": "tags.x"}, "Invalid order_by"),
    ("GET", "registered-models/search", {"page_token": "!"}, "Invalid page token"),
    ("GET", "model-versions/search", {"max_results": "200001"}, "'max_results'"),
    ("GET", "model-versions/search", {"max_results": "0"}, "'max_results'"),
    ("GET", "model-versions/search", {"filter": "version_number = 'x'"}, "Expected numeric value"),
    ("POST", "model-versions/set-tag", {"name": "m", "version": 1, "key": "k"}, "Invalid value 1 for parameter 'version'"),
    ("GET", "model-versions/search", {"filter": "name = 'm' or name = 'n'"}, "Invalid clause(s) in filter string"),
    ("GET", "registered-models/alias", {"name": "m", "alias": "none"}, "Registered model alias none not found."),
    ("GET", "model-versions/get", {"name": "m", "version": "abc"}, "must be an integer, got 'abc'"),
]


def test_invalid_request_is_refused_with_mlflows_message(registry: TestClient) -> None:
    for method, path, body, message in REFUSALS:
        sent: dict[str, Any] = {"params": body} if method == "GET" else {"json": body}
        assert message in check_refused(registry.request(method, f"/api/2.0/mlflow/{path}", **sent)), (path, body)


MISSING: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "registered-models/get", {"name": "nobody"}),
    ("POST", "registered-models/rename", {"name": "nobody", "new_name": "x"}),
    ("PATCH", "registered-models/update", {"name": "nobody", "description": "x"}),
    ("DELETE", "registered-models/delete", {"name": "nobody"}),
    ("POST", "registered-models/set-tag", {"name": "nobody", "key": "k"}),
    ("DELETE", "registered-models/delete-tag", {"name": "nobody", "key": "k"}),
    ("DELETE", "registered-models/alias", {"name": "nobody", "alias": "a"}),
    ("GET", "registered-models/get-latest-versions", {"name": "nobody"}),
    ("POST", "registered-models/alias", {"name": "m", "alias": "a", "version": "1"}),
    ("POST", "registered-models/alias", {"name": "m", "alias": "a", "version": "9999999999999999999"}),
    ("POST", "model-versions/create", {"name": "nobody", "source": "runs:/x/y", "run_id": "x"}),
    ("GET", "model-versions/get", {"name": "m", "version": "1"}),
    ("GET", "model-versions/get", {"name": "m", "version": "9999999999"}),
    ("GET", "model-versions/get-download-uri", {"name": "m", "version": "0"}),
    ("PATCH", "model-versions/update", {"name": "m", "version": "1", "description": "x"}),
    ("POST", "model-versions/transition-stage", {"name": "m", "version": "1", "stage": "Staging"}),
    ("DELETE", "model-versions/delete", {"name": "m", "version": "1"}),
    ("POST", "model-versions/set-tag", {"name": "m", "version": "1", "key": "k"}),
    ("DELETE", "model-versions/delete-tag", {"name": "m", "version": "1", "key": "k"}),
]


def test_missing_model_or_version_answers_404(registry: TestClient) -> None:
    for method, path, body in MISSING:
        sent: dict[str, Any] = {"params": body} if method == "GET" else {"json": body}
        answer = registry.request(method, f"/api/2.0/mlflow/{path}", **sent)
        assert "not found" in check_refused(answer, "RESOURCE_DOES_NOT_EXIST", 404), path
