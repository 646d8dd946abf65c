"""MLflow's REST API on the wire: requests of other clients, and details never exposed."""

import json
import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.routes.mlflow import metrics

RUNS = "/api/2.0/mlflow/runs"
JSON = {"Content-Type": "application/json"}


def new_run(http: TestClient) -> str:
    return str(http.post(f"{RUNS}/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"])


@pytest.mark.requirement("F11")
@pytest.mark.parametrize(
    "body",
    [
        '{"run_id": "RUN", "key": "k", "timestamp": 1, "value": NaN}',
        '{"run_id": "RUN", "key": "k", "timestamp": 1, "value": true}',
        '{"run_id": "RUN", "key": "k", "timestamp": 1, "value": "much"}',
        '{"run_id": "RUN", "key": "k", "timestamp": 1, "value": null}',
        '{"run_id": "RUN", "key": "k", "timestamp": 1e30, "value": 1}',
        '{"run_id": "RUN", "key": "k", "timestamp": 99999999999999999999, "value": 1}',
        '{"run_id": "RUN", "key": "k", "timestamp": 1, "step": 9223372036854775808, "value": 1}',
        '{"run_id": "RUN", "key": "\\u0000", "timestamp": 1, "value": 1}',
        '{"run_id": "RUN", "key": "\\ud800", "timestamp": 1, "value": 1}',
        '{"run_id": "RUN", "key": "k", "timestamp": 1}',
        '{"run_id": "RUN"',
        "[" * 100_000,
        "[]",
        "",
        "null",
    ],
    ids=lambda body: body[:60],
)
def test_invalid_body_answers_400_and_stores_nothing(http: TestClient, body: str) -> None:
    run_id = new_run(http)
    answer = http.post(f"{RUNS}/log-metric", content=body.replace("RUN", run_id), headers=JSON)
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert set(answer.json()) == {"error_code", "message"}
    assert "\n" not in answer.json()["message"]
    assert http.get(f"{RUNS}/get", params={"run_id": run_id}).json()["run"]["data"]["metrics"] == []


def test_numbers_may_be_strings_as_in_protobuf(http: TestClient) -> None:
    run_id = new_run(http)
    body = {"run_uuid": run_id, "key": "k", "value": "Infinity", "timestamp": "5", "step": "7", "unknown": 1}
    assert http.post(f"{RUNS}/log-metric", json=body).json() == {}
    query = {"run_id": run_id, "metric_key": "k"}
    [point] = http.get("/ajax-api/2.0/mlflow/metrics/get-history", params=query).json()["metrics"]
    assert point == {"key": "k", "value": 1.7976931348623157e308, "timestamp": 5, "step": 7}


def test_nan_travels_as_a_string(http: TestClient) -> None:
    run_id = new_run(http)
    http.post(f"{RUNS}/log-metric", json={"run_id": run_id, "key": "k", "value": "NaN", "timestamp": 5})
    [point] = http.get(f"{RUNS}/get", params={"run_id": run_id}).json()["run"]["data"]["metrics"]
    assert point["value"] == "NaN"


def test_every_mlflow_route_has_its_mirror(http: TestClient) -> None:
    paths = set(http.get("/openapi.json").json()["paths"])
    served = {path.removeprefix("/api/") for path in paths if path.startswith("/api/2.0")}
    mirrored = {path.removeprefix("/ajax-api/") for path in paths if path.startswith("/ajax-api/2.0")}
    assert served == mirrored
    assert len(served) > 25


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("experiments/create", {}, "Missing value for required parameter 'name'"),
        ("experiments/create", {"name": ""}, "Missing value for required parameter 'name'"),
        ("experiments/create", {"name": None}, "Missing value for required parameter 'name'"),
        ("experiments/create", {"name": 123}, "Invalid value 123 for parameter 'name'"),
        ("experiments/create", {"name": 1.5}, "Hint: Value was of type 'float'"),
        ("experiments/create", {"name": "n", "tags": "5"}, "Invalid value \"5\" for parameter 'tags'"),
        ("experiments/search", {"order_by": ["tags.a"]}, "Invalid order_by entity: tag"),
        ("experiments/search", {"filter": "experiment_id LIKE '1'"}, "Invalid comparator for experiment_id: LIKE"),
        ("experiments/search", {"filter": "experiment_id = 'x'"}, "Invalid experiment ID 'x'"),
        ("runs/search", {"experiment_ids": ["0"], "filter": "datasets.size = 'x'"}, "Invalid dataset key 'size'"),
        ("runs/search", {"experiment_ids": ["0"], "order_by": ["datasets.name"]}, "Invalid order_by entity: dataset"),
        ("runs/set-tag", {"run_id": "RUN", "key": None, "value": "v"}, "Missing value for required parameter 'key'"),
        ("runs/log-parameter", {"run_id": None, "key": "k"}, "Missing value for required parameter 'run_id'"),
        ("experiments/create", {"name": "x" * 501}, "'name' exceeds the maximum length of 500 characters"),
        ("experiments/delete", {"experiment_id": "abc"}, "Experiment ID must be a valid integer"),
        ("runs/search", {"experiment_ids": ["9999999999999999999"]}, "Experiment ID must be a valid integer"),
        ("runs/search", {"experiment_ids": ["0"], "filter": "x = 'y'"}, "Invalid attribute key 'x'"),
        (
            "runs/search",
            {"experiment_ids": ["0"], "max_results": 50_001},
            "'max_results' supplied. It must be at most 50000",
        ),
        (
            "runs/search",
            {"experiment_ids": ["0"], "max_results": 0},
            "'max_results' supplied. It must be a positive integer",
        ),
        ("runs/search", {"experiment_ids": ["0"], "page_token": "!"}, "Invalid page token"),
        ("runs/search", {"experiment_ids": "0"}, "'experiment_ids'"),
        ("runs/update", {"run_id": "RUN", "status": "DONE"}, "'status'"),
        ("runs/log-metric", {}, "Missing value for required parameter 'run_id'"),
        ("runs/log-batch", {"run_id": "RUN", "params": [{"value": "1"}]}, "'params[0].key'"),
        (
            "runs/log-batch",
            {"run_id": "RUN", "params": [{"key": ""}]},
            "Missing value for required parameter 'params[0].key'",
        ),
        ("runs/log-batch", {"run_id": "RUN", "tags": [{"key": ""}]}, "Missing value for required parameter 'tags[0].key'"),
        (
            "runs/log-batch",
            {"run_id": "RUN", "tags": [{"key": "x" * 251}]},
            "'tags[0].key' exceeds the maximum length of 250",
        ),
        (
            "runs/log-batch",
            {"run_id": "RUN", "metrics": [{"key": "", "value": 1, "timestamp": 1}]},
            "Missing value for required parameter 'metrics[0].key'",
        ),
        ("runs/log-batch", {"run_id": "RUN", "metrics": [{"key": ".", "value": 1, "timestamp": 1}]}, "'metrics[0].name'"),
        ("runs/log-batch", {"run_id": "RUN", "tags": [{"key": "a", "value": "x" * 1_000_000}]}, "at most 1000000 bytes"),
        (
            "runs/log-metric",
            {"run_id": "RUN", "key": "k", "value": 1, "timestamp": 1, "dataset_name": "d"},
            "Both dataset_name and dataset_digest must be provided",
        ),
        (
            "runs/log-batch",
            {"run_id": "RUN", "metrics": [{"key": "k", "value": 1, "timestamp": 1, "dataset_digest": "1"}]},
            "Both dataset_name and dataset_digest must be provided",
        ),
    ],
)
def test_a_refusal_names_the_parameter(http: TestClient, path: str, body: dict[str, Any], message: str) -> None:
    sent = json.loads(json.dumps(body).replace("RUN", new_run(http)))
    answer = http.post(f"/api/2.0/mlflow/{path}", json=sent)
    assert answer.status_code == 400
    assert message in answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("log-parameter", {"key": "lr", "value": "2"}, "Param with key='lr' was already logged with value='1' for run ID="),
        (
            "log-batch",
            {"params": [{"key": "lr", "value": "2"}]},
            "Params were already logged='[{'key': 'lr', 'old_value': '1', 'new_value': '2'}]' for run ID=",
        ),
    ],
)
def test_changing_a_param_is_refused_with_mlflows_message_for_that_call(
    http: TestClient, path: str, body: dict[str, Any], message: str
) -> None:
    """MLflow's `log_param` and `log_params` differ even for a single param."""
    run_id = new_run(http)
    http.post(f"{RUNS}/log-parameter", json={"run_id": run_id, "key": "lr", "value": "1"})
    answer = http.post(f"{RUNS}/{path}", json={"run_id": run_id, **body})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert f"Changing param values is not allowed. {message}'{run_id}'." in answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("update", {"run_name": ""}),
        ("set-tag", {"key": "mlflow.runName", "value": ""}),
        ("log-batch", {"tags": [{"key": "mlflow.runName", "value": ""}, {"key": "other", "value": ""}]}),
    ],
)
def test_run_name_is_kept_when_an_update_sends_an_empty_one(http: TestClient, path: str, body: dict[str, Any]) -> None:
    made = http.post(f"{RUNS}/create", json={"experiment_id": "0", "run_name": "first"}).json()["run"]["info"]
    assert http.post(f"{RUNS}/{path}", json={"run_id": made["run_id"], **body}).status_code == 200
    run = http.get(f"{RUNS}/get", params={"run_id": made["run_id"]}).json()["run"]
    assert run["info"]["run_name"] == "first"
    assert {"key": "mlflow.runName", "value": "first"} in run["data"]["tags"]


def test_a_field_may_be_named_in_double_quotes(http: TestClient) -> None:
    for name in ("a", "b"):
        http.post(f"{RUNS}/create", json={"experiment_id": "0", "run_name": name})
    for asked, found in (
        ({"filter": """"run_name" = "a" AND "status" = 'RUNNING'"""}, ["a"]),
        ({"order_by": ['"run_name" DESC']}, ["b", "a"]),
    ):
        runs = http.post(f"{RUNS}/search", json={"experiment_ids": ["0"], **asked}).json()["runs"]
        assert [run["info"]["run_name"] for run in runs] == found
    for text in ("'run_name' = 'a'", '"a" = "b"', '"attributes.run_name" = "a"', '"'):
        answer = http.post(f"{RUNS}/search", json={"experiment_ids": ["0"], "filter": text})
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE"), text


def test_run_times_are_stored_as_sent_by_the_client(http: TestClient) -> None:
    """Also before 1970, and an end time of an active run: MLflow keeps both."""
    made = http.post(f"{RUNS}/create", json={"experiment_id": "0", "start_time": -5}).json()["run"]["info"]
    for status, end in (("SCHEDULED", 70), ("RUNNING", -70), ("FINISHED", 7)):
        changed = http.post(f"{RUNS}/update", json={"run_id": made["run_id"], "status": status, "end_time": end}).json()
        assert (changed["run_info"]["status"], changed["run_info"]["end_time"]) == (status, end)
    goes_on = http.post(f"{RUNS}/update", json={"run_id": made["run_id"], "status": "RUNNING"}).json()["run_info"]
    assert (goes_on["status"], goes_on["end_time"]) == ("RUNNING", 7)
    at_zero = http.post(f"{RUNS}/create", json={"experiment_id": "0", "start_time": 0}).json()["run"]["info"]
    assert at_zero["start_time"] == 0
    ended = http.post(f"{RUNS}/update", json={"run_id": at_zero["run_id"], "status": "FINISHED"}).json()["run_info"]
    assert (ended["status"], ended.get("end_time")) == ("FINISHED", None)
    zero = http.post(f"{RUNS}/update", json={"run_id": at_zero["run_id"], "end_time": 0}).json()["run_info"]
    assert zero["end_time"] == 0


def test_body_without_json_content_type_is_refused(http: TestClient) -> None:
    answer = http.post(f"{RUNS}/create", content='{"experiment_id": "0"}', headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert answer.json()["message"].startswith("Bad Request. Content-Type must be application/json")


def test_double_encoded_json_and_byte_order_mark_are_accepted(http: TestClient) -> None:
    """MLflow's server accepts it, from old clients."""
    twice = json.dumps(json.dumps({"experiment_id": "0", "run_name": "twice"}))
    headers = {"Content-Type": "application/json"}
    made = http.post(f"{RUNS}/create", content=twice, headers=headers).json()["run"]["info"]
    point = {"run_id": made["run_id"], "key": "k", "value": 1.0, "timestamp": 1}
    assert http.post(f"{RUNS}/log-metric", content=json.dumps(json.dumps(point)), headers=headers).status_code == 200
    assert http.get(f"{RUNS}/get", params={"run_id": made["run_id"]}).json()["run"]["data"]["metrics"][0]["key"] == "k"
    assert made["run_name"] == "twice"
    # With a byte order mark, as .NET and PowerShell write UTF-8.
    marked = "\ufeff" + json.dumps({"experiment_id": "0", "run_name": "marked"})
    assert http.post(f"{RUNS}/create", content=marked, headers=headers).json()["run"]["info"]["run_name"] == "marked"
    for nonsense in ('"text"', json.dumps(twice)):
        assert http.post(f"{RUNS}/create", content=nonsense, headers=headers).status_code == 400


def test_missing_objects_and_endpoints_answer_404_with_mlflows_error_code(http: TestClient) -> None:
    for path in ("experiments/get?experiment_id=99999999999999999999", "experiments/get?experiment_id=7"):
        assert http.get(f"/api/2.0/mlflow/{path}").status_code in (400, 404)
    negative = http.get("/api/2.0/mlflow/experiments/get", params={"experiment_id": "-1"})
    assert (negative.status_code, negative.json()["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")
    missing = http.get(f"{RUNS}/get", params={"run_id": "nope"})
    assert (missing.status_code, missing.json()["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")
    unknown = http.get("/api/2.0/mlflow/nothing")
    assert (unknown.status_code, unknown.json()["error_code"]) == (404, "ENDPOINT_NOT_FOUND")
    assert http.get(f"{RUNS}/create").json()["error_code"] == "ENDPOINT_NOT_FOUND"


@pytest.mark.parametrize(
    "path",
    [
        "/api/2.0/mlflow/runs/get",
        "/api/2.0/mlflow/metrics/get-history",
        "/ajax-api/2.0/mlflow/artifacts/list",
        "/get-artifact",
        "/ajax-api/2.0/mlflow/artifacts/get",
    ],
)
def test_query_accepts_run_id_or_run_uuid_and_refuses_neither(http: TestClient, path: str) -> None:
    missed = http.get(path)
    assert (missed.status_code, missed.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert missed.json()["message"].startswith("Missing value for required parameter 'run_id'.")
    run_id = new_run(http)
    rest = {"metric_key": "m", "path": "none"}
    answers = [http.get(path, params={word: run_id, **rest}) for word in ("run_id", "run_uuid")]
    assert "run_id" not in answers[0].text or answers[0].status_code == 200
    assert answers[0].content == answers[1].content


@pytest.mark.requirement("F11")
def test_an_error_of_the_database_shows_no_sql_and_no_path(breakable: TestClient) -> None:
    with breakable.app.state.database.write() as connection:  # type: ignore[attr-defined]
        connection.exec_driver_sql("ALTER TABLE runs RENAME TO gone")
    answer = breakable.get(f"{RUNS}/get", params={"run_id": "x"})
    assert (answer.status_code, answer.json()["error_code"]) == (503, "TEMPORARILY_UNAVAILABLE")
    assert "SELECT" not in answer.text and "gone" not in answer.text and "/" not in answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [(f"{RUNS}/create", {"experiment_id": "0"}), ("/v1/runs", {"experiment_id": "0", "name": "n", "params": {"a": 1}})],
)
def test_failed_run_creation_leaves_no_run(breakable: TestClient, path: str, body: dict[str, Any]) -> None:
    with breakable.app.state.database.write() as connection:  # type: ignore[attr-defined]
        connection.exec_driver_sql("ALTER TABLE run_models RENAME TO gone")
    assert breakable.post(path, json=body).status_code == 503
    with breakable.app.state.database.write() as connection:  # type: ignore[attr-defined]
        connection.exec_driver_sql("ALTER TABLE gone RENAME TO run_models")
    assert breakable.post(f"{RUNS}/search", json={"experiment_ids": ["0"]}).json() == {"runs": []}
    assert breakable.post(path, json=body).status_code in (200, 201)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_gateway_proxy_answers_with_no_endpoints(http: TestClient, method: str) -> None:
    path, body = "/ajax-api/2.0/mlflow/gateway-proxy", {"gateway_path": "api/2.0/endpoints/"}
    answer = http.request(method, path, json=body, headers={"Origin": "http://127.0.0.1"})
    assert (answer.status_code, answer.json()) == (200, {"endpoints": []})


def test_experiment_tags_do_not_change_its_last_update_time(http: TestClient) -> None:
    path = "/api/2.0/mlflow/experiments"
    number = http.post(f"{path}/create", json={"name": "tagged"}).json()["experiment_id"]
    made = http.get(f"{path}/get", params={"experiment_id": number}).json()["experiment"]
    time.sleep(0.01)
    for call, body in (("set", {"key": "k", "value": "v"}), ("delete", {"key": "k"})):
        assert http.post(f"{path}/{call}-experiment-tag", json={"experiment_id": number, **body}).json() == {}
        assert http.get(f"{path}/get", params={"experiment_id": number}).json()["experiment"] == {
            **made,
            "tags": [{"key": "k", "value": "v"}] if call == "set" else [],
        }


def test_unexpected_error_reveals_no_internals(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("secret in /srv/hanzo")

    monkeypatch.setattr(http.app.state.tracking.runs, "get", broken)  # type: ignore[attr-defined]
    answer = http.get(f"{RUNS}/get", params={"run_id": "x"})
    assert (answer.status_code, answer.json()["error_code"]) == (500, "INTERNAL_ERROR")
    assert "secret" not in answer.text


@pytest.mark.parametrize("header", [{"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example:8057"}, {"Host": ""}])
def test_host_header_other_than_loopback_is_refused(http: TestClient, header: dict[str, str]) -> None:
    answer = http.get("/version", headers=header)
    assert (answer.status_code, answer.json()["error_code"]) == (403, "PERMISSION_DENIED")


def test_a_page_of_another_origin_is_refused(http: TestClient) -> None:
    assert http.get("/health", headers={"Host": "localhost:8057", "Origin": "http://127.0.0.1:3000"}).status_code == 200
    assert http.get("/health", headers={"Origin": "https://evil.example"}).status_code == 403
    assert http.get("/health", headers={"Origin": "null"}).status_code == 403


def test_error_message_is_one_line_when_it_quotes_line_breaks(http: TestClient) -> None:
    refused = http.get(f"{RUNS}/get", params={"run_id": "a\nb\u2028c"}).json()
    assert refused["message"] == "Run with id=a\\nb\\u2028c not found"


def test_null_means_absent_also_inside_a_list(http: TestClient) -> None:
    run_id = new_run(http)
    point = {"key": "m", "value": 1, "timestamp": 5, "step": None, "model_id": None}
    pair = {"key": "k", "value": None}
    assert http.post(f"{RUNS}/log-batch", json={"run_id": run_id, "metrics": [point], "tags": [pair]}).json() == {}
    data = http.get(f"{RUNS}/get", params={"run_id": run_id}).json()["run"]["data"]
    assert data["metrics"] == [{"key": "m", "value": 1.0, "timestamp": 5, "step": 0}]
    assert {"key": "k", "value": ""} in data["tags"]


def test_an_enum_may_be_its_number_as_in_protobuf(http: TestClient) -> None:
    run_id = new_run(http)
    assert http.post(f"{RUNS}/update", json={"run_id": run_id, "status": 4}).json()["run_info"]["status"] == "FAILED"
    assert http.post(f"{RUNS}/update", json={"run_id": run_id, "status": "5"}).json()["run_info"]["status"] == "KILLED"
    assert http.post(f"{RUNS}/update", json={"run_id": run_id, "status": 9}).status_code == 400
    http.post(f"{RUNS}/delete", json={"run_id": run_id})
    for view, found in ((1, []), (2, [run_id]), (3, [run_id]), ("2", [run_id])):
        runs = http.post(f"{RUNS}/search", json={"experiment_ids": ["0"], "run_view_type": view}).json().get("runs", [])
        assert [run["info"]["run_id"] for run in runs] == found
    experiments = http.post("/api/2.0/mlflow/experiments/search", json={"view_type": 3}).json()["experiments"]
    assert [experiment["name"] for experiment in experiments] == ["Default"]
    assert http.post("/api/2.0/mlflow/experiments/search", json={"view_type": 4}).status_code == 400


def test_filter_list_of_one_may_end_with_a_comma(http: TestClient) -> None:
    run_id = new_run(http)
    for text, count in ((f"run_id IN {(run_id,)}", 1), ("run_id IN ('x',)", 0)):
        assert len(http.post(f"{RUNS}/search", json={"experiment_ids": ["0"], "filter": text}).json()["runs"]) == count
    for text in ("run_id IN ()", "run_id IN (,)", "run_id IN ('x',,)", "run_id IN ('x' 'y')"):
        assert http.post(f"{RUNS}/search", json={"experiment_ids": ["0"], "filter": text}).status_code == 400


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("s3://b/x#f", "can't include fragments"),
        ("http://host/;..%2F..%2Fetc", "can't include fragments or params"),
        ("s3://b/x?a=../b", "Invalid query string"),
        ("s3://b/" + "x" * 2048, "length"),
        ("runs:/r/model", "cannot be a runs:/ URI"),
        ("models:/m/1", "cannot be a models:/ URI"),
        ("http://127.0.0.1:1/x", "names a server"),
        ("mlflow-artifacts://host/x", "names a server"),
        ("mlflow-artifacts:/a/../b", "must be normalized"),
        ("mlflow-artifacts:/a%2e%2e/b", "must be normalized"),
        ("mlflow-artifacts:/7/x", "are reserved"),
        ("mlflow-artifacts:/models", "are reserved"),
        ("s3://hanzo-ml/datasets/x", "own store"),
        ("s3://hanzo-models/x", "own store"),
        ("http://[x", "not a URI"),
    ],
)
def test_unsupported_artifact_location_is_refused(http: TestClient, location: str, message: str) -> None:
    answer = http.post("/api/2.0/mlflow/experiments/create", json={"name": "n", "artifact_location": location})
    assert answer.status_code == 400 and message in answer.json()["message"]


@pytest.mark.parametrize("climb", ["..", "./../", "a/../b", "/etc"])
def test_path_traversal_is_refused_before_the_owner_is_looked_up(http: TestClient, climb: str) -> None:
    elsewhere = {"name": "n", "artifact_location": "s3://b/x"}
    number = http.post("/api/2.0/mlflow/experiments/create", json=elsewhere).json()["experiment_id"]
    run_id = http.post(f"{RUNS}/create", json={"experiment_id": number}).json()["run"]["info"]["run_id"]
    models = "/api/2.0/mlflow/logged-models"
    for path, asked in (
        ("/api/2.0/mlflow/artifacts/list", {"run_id": "nobody", "path": climb}),
        ("/api/2.0/mlflow/artifacts/list", {"run_id": run_id, "path": climb}),
        ("/get-artifact", {"run_id": "nobody", "path": climb}),
        ("/get-artifact", {"run_id": run_id, "path": climb}),
        ("/api/2.0/mlflow/artifacts/get", {"run_id": run_id, "path": climb}),
        (f"{models}/nobody/artifacts/directories", {"artifact_directory_path": climb}),
        (f"{models}/nobody/artifacts/files", {"artifact_file_path": climb}),
    ):
        answer = http.get(path, params=asked)
        assert (answer.status_code, answer.json()["message"]) == (400, "Invalid path"), path


@pytest.mark.parametrize("path", ["/health", "/version"])
def test_health_answers_head_requests(http: TestClient, path: str) -> None:
    assert (http.head(path).status_code, http.head(path).content) == (200, b"")


@pytest.mark.parametrize("path", ["/", "/static-files/index.html"])
def test_web_page_answers_head_requests(http: TestClient, path: str) -> None:
    asked, got = http.head(path), http.get(path)
    assert (asked.status_code, asked.content) == (got.status_code, b"")
    assert asked.headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/api/2.0/mlflow/runs/create", "POST"),
        ("/ajax-api/2.0/mlflow/registered-models/alias", "DELETE, GET, HEAD, POST"),
        ("/api/2.0/mlflow/logged-models/m-1", "DELETE, GET, HEAD, PATCH"),
        ("/health", "GET, HEAD"),
    ],
)
def test_wrong_method_answers_405_with_allow_header(http: TestClient, path: str, methods: str) -> None:
    answer = http.put(path)
    assert (answer.status_code, answer.json()["error_code"]) == (405, "ENDPOINT_NOT_FOUND")
    assert answer.headers["allow"] == methods


@pytest.mark.parametrize("slashes", ["/", "//", "///"])
def test_a_tracking_uri_may_end_with_a_slash(http: TestClient, slashes: str) -> None:
    run_id = new_run(http)
    body = {"run_id": run_id, "key": "k", "value": 1, "timestamp": 1}
    address = f"http://127.0.0.1{slashes}{RUNS.lstrip('/')}"
    assert http.post(f"{address}/log-metric", json=body).json() == {}
    assert http.get(f"{address}/get", params={"run_id": run_id}).json()["run"]["info"]["run_id"] == run_id


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("runs/get", {"run_id": "RUN"}),
        ("runs/get", {"run_id": None, "run_uuid": "RUN"}),
        ("metrics/get-history", {"run_id": "RUN", "metric_key": "k", "max_results": 1}),
        ("experiments/get", {"experiment_id": "0"}),
        ("experiments/search", {"max_results": 5, "order_by": ["name ASC", "creation_time"]}),
        ("artifacts/list", {"run_id": "RUN", "path": "a folder"}),
    ],
)
def test_get_parameters_may_be_sent_as_a_json_body(http: TestClient, path: str, asked: dict[str, Any]) -> None:
    run_id = new_run(http)
    http.post(f"{RUNS}/log-metric", json={"run_id": run_id, "key": "k", "value": 1, "timestamp": 1})
    asked = {name: run_id if value == "RUN" else value for name, value in asked.items()}
    by_query = http.get(
        f"/api/2.0/mlflow/{path}", params={name: value for name, value in asked.items() if value is not None}
    )
    by_body = http.request("GET", f"/api/2.0/mlflow/{path}", json=asked)
    assert (by_body.status_code, by_body.json()) == (200, by_query.json())
    # As in MLflow, a query takes precedence over the body.
    both = http.request("GET", "/api/2.0/mlflow/experiments/get", json={"experiment_id": "7"}, params={"experiment_id": "0"})
    assert both.json()["experiment"]["name"] == "Default"
    assert http.request("GET", f"/api/2.0/mlflow/{path}", content=b"{broken", headers=JSON).status_code == 400


@pytest.mark.parametrize(
    ("asked", "status", "points"),
    [
        ({"run_id": "RUN", "metric_key": "k"}, 200, 2),
        ({"run_id": "RUN", "metric_key": "absent"}, 200, 0),
        ({"run_id": "f" * 32, "metric_key": "k"}, 200, 0),
        ({"run_id": "RUN", "metric_key": "k", "max_results": "25001"}, 200, 2),
        ({"run_id": "RUN", "metric_key": "k", "max_results": "0"}, 400, 0),
        ({"run_id": "RUN", "metric_key": ""}, 400, 0),
        ({"run_id": "RUN"}, 400, 0),
        ({"metric_key": "k"}, 400, 0),
    ],
)
def test_metric_history_of_unknown_run_or_metric_is_empty(
    http: TestClient, asked: dict[str, str], status: int, points: int
) -> None:
    run_id = new_run(http)
    for step in range(2):
        http.post(f"{RUNS}/log-metric", json={"run_id": run_id, "key": "k", "value": 1, "timestamp": 1, "step": step})
    query = {name: run_id if value == "RUN" else value for name, value in asked.items()}
    answer = http.get("/api/2.0/mlflow/metrics/get-history", params=query)
    assert (answer.status_code, len(answer.json().get("metrics", []))) == (status, points)


def test_metric_history_is_ordered_by_time_when_steps_go_backwards(http: TestClient) -> None:
    """The whole history, not each page that is read at once."""
    run_id = new_run(http)
    for start in range(0, 7000, 1000):
        points = [{"key": "k", "value": 0, "timestamp": time, "step": -time} for time in range(start, start + 1000)]
        assert http.post(f"{RUNS}/log-batch", json={"run_id": run_id, "metrics": points}).json() == {}
    history = http.get("/api/2.0/mlflow/metrics/get-history", params={"run_id": run_id, "metric_key": "k"}).json()
    assert [point["timestamp"] for point in history["metrics"]] == list(range(7000))


@pytest.mark.parametrize("count", [9, 10, 11, 13, 14, 25])
def test_a_history_that_is_longer_than_a_page_is_sent_whole(
    http: TestClient, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(metrics, "MAX_HISTORY", 10)
    monkeypatch.setattr(metrics, "STREAMED_POINTS", 3)
    run_id = new_run(http)
    points = [{"key": "k", "value": 0, "timestamp": step, "step": step} for step in range(count)]
    assert http.post(f"{RUNS}/log-batch", json={"run_id": run_id, "metrics": points}).json() == {}
    history = http.get("/api/2.0/mlflow/metrics/get-history", params={"run_id": run_id, "metric_key": "k"}).json()
    assert [point["step"] for point in history["metrics"]] == list(range(count))


@pytest.mark.parametrize(("pattern", "found"), [("%" * 200 + "x", 0), ("%" * 200 + "G", 1), ("R%%_", 1)])
def test_consecutive_wildcards_in_a_like_pattern_are_collapsed(http: TestClient, pattern: str, found: int) -> None:
    """Applies to the run's status, which is matched in Python: 200 wildcards blocked the server."""
    new_run(http)
    asked = {"experiment_ids": ["0"], "filter": f"status LIKE '{pattern}'"}
    assert len(http.post(f"{RUNS}/search", json=asked).json().get("runs", [])) == found
