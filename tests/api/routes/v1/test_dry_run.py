"""`POST /v1/jobs?dry_run=true` validates as a submission does, and queues nothing.

The flag was once ignored.
"""

from typing import Any

import pytest
from fastapi.testclient import TestClient

COMMAND = {"name": "x", "command": ["python", "-c", "pass"]}


def test_dry_run_returns_the_job_without_queueing_it(http: TestClient) -> None:
    checked = http.post("/v1/jobs?dry_run=true", json=COMMAND)
    assert checked.status_code == 200
    assert http.get("/v1/jobs").json() == {"jobs": []}
    queued = http.post("/v1/jobs", json=COMMAND)
    assert queued.status_code == 201
    changes = ("id", "submitted_at")
    assert {key: value for key, value in checked.json().items() if key not in changes} == {
        key: value for key, value in queued.json().items() if key not in changes
    }


@pytest.mark.parametrize(
    "body",
    [
        {"name": "x", "dataset": "none"},
        {"name": "x", "dataset": "none", "parameters": {"max_stepz": 1}},
        {**COMMAND, "schedule": {"max_duration": "0s"}},
        {**COMMAND, "env": {"KEY": "********"}},
        {"name": "x\x00", "command": ["true"]},
    ],
)
def test_dry_run_refuses_with_the_same_message_as_submission(http: TestClient, body: dict[str, Any]) -> None:
    checked, submitted = (http.post(f"/v1/jobs{query}", json=body) for query in ("?dry_run=true", ""))
    assert checked.status_code >= 400
    assert (checked.status_code, checked.json()) == (submitted.status_code, submitted.json())


def test_unknown_query_parameters_are_refused_on_v1_alone(http: TestClient) -> None:
    refused = http.post("/v1/jobs?dryrun=true", json=COMMAND)
    assert (refused.status_code, refused.json()["message"]) == (400, "unknown query parameter 'dryrun': use dry_run")
    assert http.get("/v1/jobs").json() == {"jobs": []}
    assert http.get("/v1/experiments/0?verbose=1").json()["message"].endswith("this route takes none")
    assert http.get("/api/2.0/mlflow/experiments/get?experiment_id=0&verbose=1").status_code == 200
