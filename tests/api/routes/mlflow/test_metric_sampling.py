"""Sampled metric histories on the wire, as MLflow's web UI requests them."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

METRICS = "/ajax-api/2.0/mlflow/metrics"
RUNS = "/api/2.0/mlflow/runs"


def new_run(http: TestClient, points: list[dict[str, Any]]) -> str:
    run_id = str(http.post(f"{RUNS}/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"])
    assert http.post(f"{RUNS}/log-batch", json={"run_id": run_id, "metrics": points}).json() == {}
    return run_id


def series(count: int) -> list[dict[str, Any]]:
    return [{"key": "m", "value": 10.0, "timestamp": 1, "step": step} for step in range(count)]


def test_bulk_interval_returns_a_sample_of_each_run(http: TestClient) -> None:
    short, long = new_run(http, series(10)), new_run(http, series(20))
    query: dict[str, Any] = {"run_ids": [long, short], "metric_key": "m", "max_results": 5}
    metrics = http.get(f"{METRICS}/get-history-bulk-interval", params=query).json()["metrics"]
    assert metrics[0] == {"key": "m", "value": 10.0, "timestamp": 1, "step": 0, "run_id": long}
    steps = {run_id: [point["step"] for point in metrics if point["run_id"] == run_id] for run_id in (long, short)}
    assert steps == {long: [0, 4, 8, 12, 19], short: [0, 2, 4, 6, 9]}
    query = {"run_ids": [short], "metric_key": "m", "start_step": 0, "end_step": 4, "max_results": 5}
    within = http.get(f"{METRICS}/get-history-bulk-interval", params=query).json()["metrics"]
    assert [point["step"] for point in within] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"metric_key": "m"}, "Missing value for required parameter 'run_ids'."),
        (
            {"run_ids": ["r"] * 101, "metric_key": "m"},
            "GetMetricHistoryBulkInterval request must specify at most 100 run_ids.",
        ),
        ({"run_ids": ["r"], "metric_key": "m", "max_results": 0}, "max_results must be between 1 and 2500"),
        ({"run_ids": ["r"], "metric_key": "m", "max_results": 2501}, "max_results must be between 1 and 2500"),
        ({"run_ids": ["r"], "metric_key": ""}, "Missing value for required parameter 'metric_key'"),
        ({"run_ids": ["r"]}, "Missing value for required parameter 'metric_key'"),
        (
            {"run_ids": ["r"], "metric_key": "m", "start_step": 1, "end_step": 0},
            "end_step must be greater than start_step. ",
        ),
        (
            {"run_ids": ["r"], "metric_key": "m", "start_step": 1},
            "If either start step or end step are specified, both must",
        ),
        ({"run_ids": ["r"], "metric_key": "m", "start_step": 2**63, "end_step": 2**63}, "'start_step'"),
    ],
)
def test_invalid_sampling_request_is_refused(http: TestClient, query: dict[str, Any], message: str) -> None:
    answer = http.get(f"{METRICS}/get-history-bulk-interval", params=query)
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert message in answer.json()["message"]


def test_bulk_history_returns_whole_histories_ordered_by_run_and_time(http: TestClient) -> None:
    points = [
        {"key": "m", "timestamp": 1, "step": 3, "value": 11.0},
        {"key": "m", "timestamp": 2, "step": 2, "value": 12.0},
        {"key": "m", "timestamp": 3, "step": 1, "value": "NaN"},
    ]
    ids = sorted(new_run(http, points) for _ in range(2))
    query: dict[str, Any] = {"run_id": list(reversed(ids)), "metric_key": "m"}
    expected = [{**point, "run_id": run_id} for run_id in ids for point in points]
    assert http.get(f"{METRICS}/get-history-bulk", params=query).json()["metrics"] == expected
    limited = http.get(f"{METRICS}/get-history-bulk", params={**query, "max_results": 4}).json()["metrics"]
    assert limited == expected[:4]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"metric_key": "m"}, "GetMetricHistoryBulk request must specify at least one run_id"),
        ({"run_id": ["r"] * 101, "metric_key": "m"}, "GetMetricHistoryBulk request cannot specify more than"),
        ({"run_id": ["r"]}, "GetMetricHistoryBulk request must specify a metric_key"),
    ],
)
def test_invalid_bulk_history_request_is_refused(http: TestClient, query: dict[str, Any], message: str) -> None:
    answer = http.get(f"{METRICS}/get-history-bulk", params=query)
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert message in answer.json()["message"]
