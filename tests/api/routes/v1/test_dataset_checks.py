"""/v1/datasets/{id}/checks and /report: pending, then the findings; a recheck request is an event.

Organizations are isolated.
"""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from resources.datasets.validations import CHECK_REQUESTED_EVENT
from resources.metadata.database import Database
from resources.metadata.outbox import read_after
from resources.settings.settings import Settings
from tests.support.api.dataset_contract import create, validate


def test_a_version_is_pending_until_it_was_checked(http: TestClient) -> None:
    made = create(http)
    found = http.get(f"/v1/datasets/{made['id']}/checks").json()
    assert (found["status"], found["checks"], found["checked_at"]) == ("pending", [], None)
    answer = http.get(f"/v1/datasets/{made['id']}/report")
    assert answer.status_code == 409
    assert "d@1 was not checked yet" in answer.json()["message"]


def test_blocked_version_has_violations_and_an_escaped_report(http: TestClient, settings: Settings, tmp_path: Any) -> None:
    made = create(http)
    validate(settings, made, tmp_path)
    found = http.get(f"/v1/datasets/{made['id']}/checks").json()
    assert found["status"] == "blocked"
    assert "line 1, answer must be string" in found["blocked"]
    assert found["violations"]["first"] == [{"line": 1, "column": "answer", "reason": "must be string", "value": "5"}]
    answer = http.get(f"/v1/datasets/{made['id']}/report")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "sandbox" in answer.headers["content-security-policy"]
    assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
    assert "&lt;b&gt;She.&lt;/b&gt;" in answer.text and "<b>She.</b>" not in answer.text


def test_dataset_list_shows_check_status_of_each_version(http: TestClient, settings: Settings, tmp_path: Any) -> None:
    made = create(http)
    assert made["checks"] == {"status": "pending", "blocked": "", "problem": ""}
    validate(settings, made, tmp_path)
    http.post("/v1/datasets", data={"name": "e"}, files={"files": ("e.jsonl", b'{"text": "She keeps it."}\n')})
    listed = {each["name"]: each["checks"] for each in http.get("/v1/datasets").json()["datasets"]}
    assert (listed["d"]["status"], listed["e"]["status"]) == ("blocked", "pending")
    assert "line 1, answer must be string" in listed["d"]["blocked"]
    assert http.get(f"/v1/datasets/{made['id']}").json()["checks"] == listed["d"]


def test_requesting_checks_emits_one_event(http: TestClient, settings: Settings) -> None:
    made = create(http)
    assert http.post(f"/v1/datasets/{made['id']}/checks").status_code == 202
    database = Database(settings.database_url)
    with database.read() as connection:
        (event,) = read_after(connection, 0, [CHECK_REQUESTED_EVENT])
    database.close()
    assert (event.payload["dataset_id"], event.payload["version"]) == (made["id"], 1)


@pytest.mark.parametrize(("method", "what"), [("GET", "checks"), ("POST", "checks"), ("GET", "report")])
def test_an_unknown_version_is_not_found(http: TestClient, method: str, what: str) -> None:
    assert http.request(method, f"/v1/datasets/nobody/{what}").status_code == 404
