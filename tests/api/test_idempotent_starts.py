"""Work with an Idempotency-Key is started once: clients repeat calls without a response."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.support.server_process import ServerProcess

RECIPE = {"name": "once", "dataset": "once", "recipe": "smollm2-135m-lora", "parameters": {"max_steps": 3}}
COMMAND = {"name": "once", "command": ["python", "train.py"], "files": {"train.py": "print(1)\n"}}
PIPELINE = {"pipeline_id": "once", "config": {"data_source": "once", "model_type": "smollm2-135m-lora"}}
CALLS = pytest.mark.parametrize(
    ("path", "body", "other"),
    [
        ("/v1/jobs", RECIPE, {**RECIPE, "parameters": {"max_steps": 4}}),
        ("/v1/jobs", COMMAND, RECIPE),
        ("/v1/pipelines/runs", PIPELINE, {"pipeline_id": "nothing", "config": {"data_source": "nothing"}}),
        ("/api/v1/pipelines/runs", PIPELINE, PIPELINE),
        ("/v1/datasets/{dataset}/prepare", {}, {"name": "another"}),
    ],
    ids=["recipe", "command", "pipeline", "alias", "preparation"],
)


@pytest.fixture(scope="module")
def dataset(server_on_either: ServerProcess) -> str:
    files = {"files": ("a.jsonl", b'{"instruction": "1+1", "answer": "2"}\n' * 4)}
    made = httpx.post(f"{server_on_either.url}/v1/datasets", data={"name": "once"}, files=files, trust_env=False)
    assert made.status_code in (200, 201), made.text
    return str(made.json()["id"])


def started(server: ServerProcess, path: str, body: Mapping[str, Any], key: str | None) -> str:
    headers = {} if key is None else {"Idempotency-Key": key}
    answer = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def submitted(server: ServerProcess) -> set[str]:
    return {job["id"] for job in httpx.get(f"{server.url}/v1/jobs", trust_env=False).json()["jobs"]}


@CALLS
def test_requests_with_the_same_idempotency_key_start_one_job(
    server_on_either: ServerProcess, dataset: str, path: str, body: Mapping[str, Any], other: Mapping[str, Any]
) -> None:
    path, key, before = path.format(dataset=dataset), uuid4().hex, submitted(server_on_either)
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: started(server_on_either, path, body, key), range(8)))
    assert len(found) == 1
    assert submitted(server_on_either) - before == found
    (job,) = found
    httpx.post(f"{server_on_either.url}/v1/jobs/{job}/cancel", trust_env=False).raise_for_status()
    assert started(server_on_either, path, other, key) == job, "whatever the body says, and however it ended"
    events = httpx.get(f"{server_on_either.url}/v1/events", params={"limit": 1000}, trust_env=False).json()["events"]
    assert [event["key"] for event in events if event["type"] == "job.submitted"].count(job) == 1


@CALLS
def test_requests_with_different_keys_or_none_start_separate_jobs(
    server_on_either: ServerProcess, dataset: str, path: str, body: Mapping[str, Any], other: Mapping[str, Any]
) -> None:
    path = path.format(dataset=dataset)
    keys = [uuid4().hex, uuid4().hex, None, None]
    assert len({started(server_on_either, path, body, key) for key in keys}) == len(keys)


def test_idempotency_key_is_scoped_to_its_path(server_on_either: ServerProcess, dataset: str) -> None:
    key = uuid4().hex
    calls = {"/v1/jobs": RECIPE, "/v1/pipelines/runs": PIPELINE, f"/v1/datasets/{dataset}/prepare": {}}
    assert len({started(server_on_either, path, body, key) for path, body in calls.items()}) == len(calls)


@pytest.mark.parametrize("key", ["", "k" * 251])
def test_invalid_idempotency_key_is_refused(server_on_either: ServerProcess, key: str) -> None:
    url = f"{server_on_either.url}/v1/jobs"
    answer = httpx.post(url, json=COMMAND, headers={"Idempotency-Key": key}, trust_env=False)
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs",
        "/v1/hpo",
        "/v1/pipelines/runs",
        "/v1/datasets/{dataset_id}/prepare",
        "/v1/runs/{run_id}/replay",
    ],
)
def test_idempotency_key_header_is_in_the_openapi_document(server_on_either: ServerProcess, path: str) -> None:
    described = json.loads(httpx.get(f"{server_on_either.url}/openapi.json", trust_env=False).text)
    named = {each["name"].lower(): each["in"] for each in described["paths"][path]["post"]["parameters"]}
    assert named["idempotency-key"] == "header"
