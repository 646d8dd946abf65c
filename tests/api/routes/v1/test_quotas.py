"""An organization's quota at submission: what is refused and what is queued."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api import dependencies
from api.auth.permissions import Caller
from tests.api.conftest import answering, migrated
from tests.resources.hpo.sweep_files import small
from tests.support.postgres_server import PostgresServer

QUOTAS = """
scheduler:
  quotas:
    default: {max_gpus: 4, max_concurrent_jobs: 3, priority: medium, preemptible: true}
"""
RECORDS = b'{"instruction": "1+1", "answer": "2"}\n' * 4
ADVICE = "ask for fewer, or have the operator raise max_gpus in scheduler.quotas"


@pytest.fixture(params=["sqlite", "postgresql"])
def http(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestClient]:
    (tmp_path / "config.yaml").write_text(QUOTAS)
    more = {}
    if request.param == "postgresql":
        postgres: PostgresServer = request.getfixturevalue("postgres")
        more = {"HANZO_ML_DATABASE_URL": postgres.url(postgres.create())}
    with answering(migrated(tmp_path, **more)) as client:
        files = {"files": ("a.jsonl", RECORDS, "application/jsonl")}
        assert client.post("/v1/datasets", data={"name": "corpus"}, files=files).is_success
        yield client


def as_researcher(http: TestClient) -> None:
    caller = Caller("ann", "default", frozenset({"ml-researcher"}))
    assert isinstance(http.app, FastAPI)
    http.app.dependency_overrides[dependencies.caller] = lambda: caller


def ask(http: TestClient, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = http.post(path, json=body)
    return answer.status_code, answer.json()


def start(http: TestClient, gpus: int, **changes: Any) -> tuple[int, dict[str, Any]]:
    base = {"dataset": "corpus", "eval_steps": 5, "distributed": {"gpus_per_node": gpus} if gpus > 1 else None}
    body = small(base_config=base, resources_per_trial={"gpus": gpus}) | changes
    return ask(http, "/v1/hpo", **{key: value for key, value in body.items() if value is not None})


@pytest.mark.requirement("J11")
def test_job_larger_than_the_quota_is_refused_and_a_smaller_one_queued(http: TestClient) -> None:
    command = {"name": "c", "command": ["python", "train.py"]}
    for body in (
        {**command, "resources": {"gpus": 5}},
        {**command, "distributed": {"num_nodes": 5, "gpus_per_node": 1}},
        {"name": "j", "dataset": "corpus", "parameters": {"hardware": {"gpus": 5}, "distributed": {"gpus_per_node": 5}}},
    ):
        status, said = ask(http, "/v1/jobs", **body)
        assert (status, said["error_code"]) == (400, "INVALID_PARAMETER_VALUE"), body
        assert said["message"] == f"the job asks for 5 GPUs, and the quota of your organization is 4: {ADVICE}"
    for body in (
        {**command, "resources": {"gpus": 4}, "schedule": {"priority": "high"}},
        {"name": "j", "dataset": "corpus", "parameters": {"hardware": {"gpus": 4}, "distributed": {"gpus_per_node": 4}}},
    ):
        status, job = ask(http, "/v1/jobs", **body)
        assert (status, job["status"]) == (201, "queued")
        assert job["config"]["schedule"].items() >= {"priority": "medium", "preemptible": True}.items()


@pytest.mark.requirement("W3")
def test_sweep_of_a_researcher_is_limited_to_the_quota(http: TestClient) -> None:
    as_researcher(http)
    status, said = start(http, 2, max_concurrent_trials=3)
    assert (status, said["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert said["message"].endswith(
        "the quota of your organization is 4: lower max_concurrent_trials to 2, or resources_per_trial.gpus"
    )
    status, said = start(http, 0, max_concurrent_trials=4)
    assert (status, said["message"].endswith("is 3 jobs at once: lower it to 3")) == (400, True)
    assert start(http, 2, max_concurrent_trials=3, max_trials=2)[0] == 201  # never three at once
    status, sweep = start(http, 1, max_concurrent_trials=None)
    assert (status, sweep["max_concurrent_trials"]) == (201, 3)  # hpo.max_concurrent_trials says 8
    schedule = sweep["config"]["base_config"]["schedule"]
    assert (schedule["priority"], schedule["preemptible"]) == ("low", True)


def test_sweep_of_an_admin_may_exceed_the_quota_unless_one_trial_does(http: TestClient) -> None:
    assert start(http, 2, max_concurrent_trials=4)[0] == 201
    status, said = start(http, 5)
    assert (status, said["message"].startswith("the job asks for 5 GPUs")) == (400, True)
