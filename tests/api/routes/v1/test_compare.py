"""`GET /v1/runs/compare`."""

from typing import Any

import pytest
from fastapi.testclient import TestClient


def logged(http: TestClient, params: dict[str, Any], metrics: dict[str, Any]) -> str:
    run = http.post("/v1/runs", json={"experiment_name": "e", "params": params}).json()["id"]
    points = [{"key": key, "value": value} for key, value in metrics.items()]
    assert http.post(f"/v1/runs/{run}/metrics", json={"metrics": points}).status_code == 200
    return str(run)


@pytest.fixture
def pair(http: TestClient) -> tuple[str, str]:
    first = logged(
        http,
        {"model": "zen", "learning_rate": 2e-5, "seed": 1},
        {"eval/loss": 0.5, "epoch": 3, "system/total_gpu_hours": 1.5},
    )
    body = {"status": "completed", "end_time": http.get(f"/v1/runs/{first}").json()["start_time"] + 90_500}
    http.patch(f"/v1/runs/{first}/status", json=body)
    return first, logged(http, {"model": "zen", "learning_rate": 1e-4}, {"eval/loss": "NaN", "epoch": 3})


@pytest.mark.requirement("E9")
@pytest.mark.parametrize("query", ["ids={0},{1}", "ids={0}&ids={1}", "ids={0},{1},&ids={0}"])
def test_two_runs_are_compared_side_by_side(http: TestClient, pair: tuple[str, str], query: str) -> None:
    found = http.get(f"/v1/runs/compare?{query.format(*pair)}").json()
    first, second = found["runs"]
    assert (first["id"], second["id"]) == pair
    assert (first["status"], first["duration_seconds"], first["gpu_hours"]) == ("completed", 90.5, 1.5)
    assert (second["status"], second["duration_seconds"], second["gpu_hours"]) == ("running", None, None)
    assert first["params"] == {"model": "zen", "learning_rate": "2e-05", "seed": "1"}
    assert first["metrics"] == {"eval/loss": 0.5, "epoch": 3, "system/total_gpu_hours": 1.5}
    assert found["differences"] == {
        "params": {"learning_rate": ["2e-05", "0.0001"], "seed": ["1", None]},
        "metrics": {"eval/loss": [0.5, "NaN"], "system/total_gpu_hours": [1.5, None]},
    }


@pytest.mark.parametrize(("ids", "status"), [("RUN", 400), (",", 400), ("RUN,nobody", 404), ("r," * 60 + "RUN", 404)])
def test_invalid_comparison_is_refused(http: TestClient, pair: tuple[str, str], ids: str, status: int) -> None:
    answer = http.get("/v1/runs/compare", params={"ids": ids.replace("RUN", pair[0])})
    assert (answer.status_code, set(answer.json())) == (status, {"error_code", "message"})


def test_a_thousand_runs_are_not_compared_at_once(http: TestClient) -> None:
    answer = http.get("/v1/runs/compare", params={"ids": ",".join(str(number) for number in range(1000))})
    assert answer.status_code == 400 and "Between 2 and 100 runs" in answer.json()["message"]
    assert http.get("/v1/runs/compare").status_code == 400
