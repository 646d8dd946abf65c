"""Runs are created once per Idempotency-Key, despite retries and concurrent servers."""

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import httpx
import pytest

from api.auth.permissions import LOCAL, Caller
from api.idempotency import run_id_from_key
from tests.support.server_process import ServerProcess

CREATE = "/api/2.0/mlflow/runs/create"


def made(server: ServerProcess, key: str | None, name: str) -> str:
    headers = {} if key is None else {"Idempotency-Key": key}
    body = {"experiment_id": "0", "run_name": name, "start_time": 1}
    answer = httpx.post(f"{server.url}{CREATE}", json=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["run"]["info"]["run_id"])


def test_requests_with_the_same_idempotency_key_create_one_run(server_on_either: ServerProcess) -> None:
    key = uuid4().hex
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda number: made(server_on_either, key, f"name {number}"), range(8)))
    assert len(found) == 1
    assert {made(server_on_either, key, "later")} == found
    assert made(server_on_either, uuid4().hex, "later") not in found


def test_requests_without_a_key_create_separate_runs(server_on_either: ServerProcess) -> None:
    """As on MLflow's server: two processes that start at once send the same request."""
    assert made(server_on_either, None, "same") != made(server_on_either, None, "same")


@pytest.mark.parametrize("key", ["", "k" * 251])
def test_invalid_idempotency_key_is_refused(server_on_either: ServerProcess, key: str) -> None:
    url = f"{server_on_either.url}{CREATE}"
    answer = httpx.post(url, json={"experiment_id": "0"}, headers={"Idempotency-Key": key}, trust_env=False)
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


def test_same_key_of_different_callers_creates_different_runs() -> None:
    callers = [
        LOCAL,
        *(Caller(user, organization, frozenset()) for user in ("ann", "bob") for organization in ("acme", "rival")),
        Caller("acme", "ann", frozenset()),
    ]
    assert len({run_id_from_key("key", caller) for caller in callers}) == len(callers)
