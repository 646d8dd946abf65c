"""MLflow's limits, each at the limit and one above it.

Too many items are refused, and so is a long value of an experiment; a run's long param or tag is truncated, as MLflow's
server does by default.
"""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

pytestmark = pytest.mark.requirement("F9")

API = "/api/2.0/mlflow"


@pytest.fixture
def run_id(http: TestClient) -> str:
    return str(http.post(f"{API}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"])


def batch(metrics: int, params: int, tags: int) -> dict[str, Any]:
    return {
        "metrics": [{"key": "m", "value": 1, "timestamp": 1, "step": step} for step in range(metrics)],
        "params": [{"key": f"p{number}", "value": "v"} for number in range(params)],
        "tags": [{"key": f"t{number}", "value": "v"} for number in range(tags)],
    }


@pytest.mark.parametrize(
    ("most", "more", "message"),
    [
        ((1000, 0, 0), (1001, 0, 0), "at most 1000 metrics. Got 1001 metrics"),
        ((0, 100, 0), (0, 101, 0), "at most 100 params. Got 101 params"),
        ((0, 0, 100), (0, 0, 101), "at most 100 tags. Got 101 tags"),
        ((900, 100, 0), (901, 100, 0), "at most 1000 metrics, params, and tags. Got 1001"),
        ((800, 100, 100), (801, 100, 100), "at most 1000 metrics, params, and tags. Got 1001"),
    ],
)
def test_batch_above_its_size_limit_is_refused(
    http: TestClient, run_id: str, most: tuple[int, int, int], more: tuple[int, int, int], message: str
) -> None:
    refused = http.post(f"{API}/runs/log-batch", json={"run_id": run_id, **batch(*more)})
    assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert message in refused.json()["message"]
    assert stored(http, run_id) == (0, 0, 0)
    assert http.post(f"{API}/runs/log-batch", json={"run_id": run_id, **batch(*most)}).status_code == 200
    assert stored(http, run_id) == most


def stored(http: TestClient, run_id: str) -> tuple[int, int, int]:
    """Return points, params and tags of a run, without the tag that is its name."""
    data = http.get(f"{API}/runs/get", params={"run_id": run_id}).json()["run"]["data"]
    history = http.get(f"{API}/metrics/get-history", params={"run_id": run_id, "metric_key": "m"}).json()
    tags = [tag for tag in data.get("tags", []) if not tag["key"].startswith("mlflow.")]
    return len(history.get("metrics", [])), len(data.get("params", [])), len(tags)


@pytest.mark.parametrize(
    ("path", "kind", "limit"), [("runs/log-parameter", "params", 6000), ("runs/set-tag", "tags", 8000)], ids=["param", "tag"]
)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "batch"])
def test_overlong_param_or_tag_of_a_run_is_truncated(
    http: TestClient, run_id: str, path: str, kind: str, limit: int, alone: bool
) -> None:
    for key, length in (("whole", limit), ("cut", limit + 1)):
        entry = {"key": key, "value": "v" * (length - 1) + "e"}
        target, body = (path, entry) if alone else ("runs/log-batch", {kind: [entry]})
        assert http.post(f"{API}/{target}", json={"run_id": run_id, **body}).status_code == 200
    data = http.get(f"{API}/runs/get", params={"run_id": run_id}).json()["run"]["data"]
    found = {entry["key"]: entry["value"] for entry in data[kind]}
    assert (found["whole"], found["cut"]) == ("v" * (limit - 1) + "e", "v" * limit)


def test_overlong_experiment_tag_is_refused(http: TestClient) -> None:
    for length, status in ((20_001, 400), (20_000, 200)):
        body = {"experiment_id": "0", "key": "note", "value": "v" * length}
        answer = http.post(f"{API}/experiments/set-experiment-tag", json=body)
        assert answer.status_code == status, answer.text
        assert status == 200 or "exceeds the maximum length of 20000 characters" in answer.json()["message"]
        found = http.get(f"{API}/experiments/get", params={"experiment_id": "0"}).json()["experiment"]
        assert len(found.get("tags", [])) == (status == 200)


@pytest.mark.parametrize("none", ["../etc", "a b", "-a", "_a", "a" * 257, "ä", "a\n"])
def test_malformed_run_id_is_refused_as_invalid(http: TestClient, none: str) -> None:
    refused = http.post(f"{API}/runs/log-batch", json={"run_id": none, **batch(1, 1, 1)})
    assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert refused.json()["message"].startswith(f"Invalid value {json.dumps(none[:250])} for parameter 'run_id' supplied: ")


@pytest.mark.parametrize("missing", ["a", "0-_", "a" * 256])
def test_missing_run_id_answers_404(http: TestClient, missing: str) -> None:
    answer = http.post(f"{API}/runs/log-batch", json={"run_id": missing, **batch(1, 1, 1)})
    assert (answer.status_code, answer.json()["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")


@pytest.mark.parametrize("path", ["runs/search", "logged-models/search"])
def test_search_with_too_many_experiments_is_refused(http: TestClient, path: str) -> None:
    """One more failed in the database.

    The server treated that as an outage, so clients retried repeatedly.
    """
    most = http.post(f"{API}/{path}", json={"experiment_ids": ["0"] * 30_000})
    assert most.status_code == 200
    refused = http.post(f"{API}/{path}", json={"experiment_ids": ["0"] * 30_001})
    assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert "at most 30000 experiments" in refused.json()["message"]


def test_filter_list_with_too_many_values_is_refused(http: TestClient, run_id: str) -> None:
    names = ",".join(f"'{number}'" for number in range(30_000))
    refused = http.post(f"{API}/runs/search", json={"experiment_ids": ["0"], "filter": f"attribute.run_id IN ({names})"})
    assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


def test_tag_name_rules_apply_to_set_tag_but_not_to_run_creation(http: TestClient) -> None:
    """MLflow's server does not validate tag names on creation.

    This server refused the same client's call.
    """
    tags = {"team@work": "a", "../up": "b", "größe": "c", "": "d", "k" * 250: "e" * 8001}
    made = http.post(f"{API}/runs/create", json={"tags": [{"key": key, "value": value} for key, value in tags.items()]})
    assert made.status_code == 200, made.text
    run_id = made.json()["run"]["info"]["run_id"]
    found = {tag["key"]: tag["value"] for tag in made.json()["run"]["data"]["tags"]}
    assert found.items() >= {**tags, "k" * 250: "e" * 8000}.items()
    assert http.post(f"{API}/runs/delete-tag", json={"run_id": run_id, "key": "../up"}).status_code == 200
    refused = http.post(f"{API}/runs/set-tag", json={"run_id": run_id, "key": "../up", "value": "b"})
    assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    for key in ("k" * 251, "a\0b"):
        assert http.post(f"{API}/runs/create", json={"tags": [{"key": key, "value": "v"}]}).status_code == 400
