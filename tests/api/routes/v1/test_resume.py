"""POST /v1/jobs/{id}/resume: where an ended job resumes, and the status of refusals."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.dependencies import from_own_user
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Manifest
from resources.metadata.database import Database
from resources.metadata.jobs import Jobs
from resources.settings.settings import Settings


@pytest.fixture
def cancelled(settings: Settings) -> str:
    jobs = Jobs(Database(settings.database_url))
    jobs.submit(id="j", name="n", config={"model": "sandbox", "dataset": "d@1"}, user="u", organization="default")
    jobs.cancel("j")
    return "j"


def answer(http: TestClient, **body: Any) -> tuple[int, dict[str, Any]]:
    got = http.post("/v1/jobs/j/resume", json=body)
    return got.status_code, got.json()


def test_cancelled_job_is_requeued_with_the_requested_gpus(http: TestClient, cancelled: str) -> None:
    status, job = answer(http, gpus=24)
    assert (status, job["id"], job["status"], job["config"]["resumed"]["gpus"]) == (200, cancelled, "queued", 24)
    assert http.get(f"/v1/jobs/{cancelled}").json()["status"] == "queued"
    (event,) = http.get("/v1/events", params={"type": "job.resumed"}).json()["events"]
    assert (event["key"], event["payload"]["gpus"], event["payload"]["resume_from"]) == (cancelled, 24, "latest")


def test_resume_without_body_uses_the_newest_checkpoint(http: TestClient, cancelled: str) -> None:
    job = http.post(f"/v1/jobs/{cancelled}/resume").json()
    assert (job["status"], job["config"]["resumed"]) == ("queued", {"times": 1, "sent_back": [], "gpus": None})


def test_resuming_a_queued_job_is_a_conflict(http: TestClient, cancelled: str) -> None:
    assert answer(http)[0] == 200
    status, said = answer(http)
    assert (status, said["error_code"]) == (409, "RESOURCE_CONFLICT")
    assert said["message"] == "job 'j' is queued: cancel it first, to resume it with other settings"


def test_resuming_from_a_missing_job_or_checkpoint_is_refused(http: TestClient, settings: Settings, cancelled: str) -> None:
    assert http.post("/v1/jobs/nothing/resume").status_code == 404
    Store(settings.store).put_manifest("s3://hanzo-ml/checkpoints/j/8", Manifest(kind="checkpoint", files=()))
    status, said = answer(http, resume_from=3)
    assert (status, said["message"]) == (400, "there is no checkpoint of step 3: there are checkpoints of steps 8")
    for wrong in ({"resume_from": "newest"}, {"gpus": 0}, {"processes": 2}):
        assert answer(http, **wrong)[0] == 400, wrong
    assert http.get(f"/v1/jobs/{cancelled}").json()["status"] == "cancelled"


def test_command_job_can_be_resumed_only_by_the_servers_own_user(
    http: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with submission: it has that user's rights."""
    jobs = Jobs(Database(settings.database_url))
    jobs.submit(
        id="c", name="n", config={"type": "training", "command": ["true"]}, user="u", organization="default", type="command"
    )
    jobs.cancel("c")
    with monkeypatch.context() as elsewhere:
        elsewhere.setitem(http.app.dependency_overrides, from_own_user, lambda: False)  # type: ignore[attr-defined]
        refused = http.post("/v1/jobs/c/resume")
    assert (refused.status_code, refused.json()["error_code"]) == (403, "PERMISSION_DENIED")
    assert http.post("/v1/jobs/c/resume").json()["status"] == "queued"
