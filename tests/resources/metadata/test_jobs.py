"""Jobs: each change is one idempotent transaction with its event; ended jobs stay ended."""

import threading
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import update

from recipes.storage.manifest import Artifact
from resources.errors import ErrorCode, HanzoError
from resources.metadata.database import Database
from resources.metadata.jobs import JobRecord, Jobs
from resources.metadata.outbox import Event, read_after
from resources.metadata.tables import jobs as table
from resources.metadata.tracking.runs import Runs

ADAPTER = Artifact(kind="adapter", uri="s3://hanzo-ml/runs/j/adapter", digest="a" * 64, size_bytes=7)
EVALUATION = {"report": {"scores": {}}, "verdict": {"accepted": True, "reasons": []}}


class JobLifecycle:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.jobs = Jobs(self.database)

    def submit(self, id: str = "j", **more: Any) -> JobRecord:
        config = {"name": "n", "model": "m", "recipe": "r"}
        return self.jobs.submit(name="n", config=config, user="ann", organization="default", id=id, **more)

    def complete(self, id: str = "j") -> None:
        with self.database.write() as connection:
            self.jobs.complete(connection, id, {"adapter": ADAPTER}, 1.5)

    def events(self) -> list[Event]:
        with self.database.read() as connection:
            return read_after(connection, 0, limit=1000)

    def types(self) -> list[str]:
        return [event.type for event in self.events() if event.type.startswith(("job.", "evaluation."))]

    def status(self, id: str = "j") -> tuple[str, str]:
        """Return the status of the job and of its tracking run."""
        return self.jobs.read(id).status, Runs(self.database).get(id).status


@pytest.fixture
def lifecycle(database: Database) -> JobLifecycle:
    return JobLifecycle(database)


def test_a_submitted_job_is_queued_and_has_a_tracking_run_of_its_id(lifecycle: JobLifecycle) -> None:
    job = lifecycle.submit()
    assert (job.status, job.started_at, job.ended_at, job.reason, job.artifacts) == ("queued", None, None, "", {})
    assert lifecycle.status() == ("queued", "queued")
    assert lifecycle.jobs.submit(name="n", config={}, user="ann", organization="default").id != job.id


@pytest.mark.requirement("Q1")
def test_the_events_have_the_fields_of_the_specification(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    lifecycle.jobs.start("j")
    lifecycle.complete()
    lifecycle.submit("k")
    lifecycle.jobs.fail("k", "no room")
    found = {event.type: event for event in lifecycle.events()}
    assert {"job_id", "user_id", "config", "timestamp"} <= set(found["job.submitted"].payload)
    assert found["job.submitted"].payload["config"]["recipe"] == "r"
    assert {"job_id", "node_ids", "gpu_ids", "timestamp"} <= set(found["job.started"].payload)
    assert {"job_id", "duration", "gpu_hours", "timestamp"} <= set(found["job.completed"].payload)
    assert found["job.failed"].payload["error"] == "no room"
    assert {event.topic for event in found.values() if event.type.startswith("job.")} == {"jobs"}
    assert found["job.failed"].key == "k"


def test_a_job_that_is_submitted_again_stays_as_it_is(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    lifecycle.jobs.start("j")
    again = lifecycle.submit()
    assert again.status == "running"
    assert lifecycle.types() == ["job.submitted", "job.started"]


def test_a_supervisor_that_comes_back_does_not_start_the_job_again(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    first = lifecycle.jobs.start("j")
    assert lifecycle.jobs.start("j") == first
    assert lifecycle.types() == ["job.submitted", "job.started"]


def test_job_completes_once_with_its_artifacts(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    lifecycle.jobs.start("j")
    lifecycle.complete()
    before = lifecycle.jobs.read("j")
    lifecycle.complete()
    assert lifecycle.jobs.read("j") == before
    assert before.artifact("adapter") == ADAPTER
    assert lifecycle.status() == ("completed", "completed")
    assert lifecycle.types() == ["job.submitted", "job.started", "job.completed"]


def test_failed_job_keeps_its_first_reason(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    lifecycle.jobs.fail("j", "no room")
    lifecycle.jobs.fail("j", "another reason")
    assert lifecycle.jobs.read("j").reason == "no room"
    assert lifecycle.status() == ("failed", "failed")
    assert lifecycle.types() == ["job.submitted", "job.failed"]


def test_restarted_failed_job_has_no_reason_and_no_end_time(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    lifecycle.jobs.start("j")
    lifecycle.jobs.fail("j", "no room")
    job = lifecycle.jobs.start("j")
    assert (job.status, job.reason, job.ended_at) == ("running", "", None)
    assert lifecycle.status() == ("running", "running")


def test_completed_job_cannot_fail_afterwards(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    lifecycle.jobs.start("j")
    lifecycle.complete()
    lifecycle.jobs.fail("j", "too late")
    assert lifecycle.status() == ("completed", "completed")


def test_a_cancelled_job_does_not_start_and_is_not_cancelled_twice(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    assert lifecycle.jobs.cancel("j").status == "cancelled"
    for change in (lifecycle.jobs.start, lifecycle.jobs.cancel):
        with pytest.raises(HanzoError, match="cancelled"):
            change("j")
    assert lifecycle.status() == ("cancelled", "cancelled")
    assert lifecycle.types() == ["job.submitted", "job.cancelled"]


def test_a_cancelled_job_does_not_turn_into_a_completed_one(lifecycle: JobLifecycle) -> None:
    """The program ended during cancellation: a cancelled job is not evaluated, registered or exported."""
    lifecycle.submit()
    lifecycle.jobs.start("j")
    lifecycle.jobs.cancel("j")
    with suppress(HanzoError):
        lifecycle.complete()
    assert lifecycle.status() == ("cancelled", "cancelled")
    assert "job.completed" not in lifecycle.types()


def test_a_job_that_has_ended_cannot_be_cancelled(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    lifecycle.jobs.start("j")
    lifecycle.complete()
    with pytest.raises(HanzoError, match="completed already"):
        lifecycle.jobs.cancel("j")


def test_job_recorded_as_running_has_started(lifecycle: JobLifecycle) -> None:
    job = lifecycle.submit(status="running")
    assert job.status == "running" and job.started_at is not None
    assert lifecycle.status() == ("running", "running")


def test_waiting_reason_of_a_queued_job_is_dropped_at_its_start(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    lifecycle.jobs.set_waiting_reason("j", "waits for the splits")
    assert lifecycle.jobs.read("j").reason == "waits for the splits"
    lifecycle.jobs.start("j")
    lifecycle.jobs.set_waiting_reason("j", "waits for the splits")
    assert lifecycle.jobs.read("j").reason == ""


def test_waiting_reason_of_a_running_job_is_set_only_while_it_runs(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    lifecycle.jobs.set_waiting_reason("j", "waits for GPUs", "running")
    assert lifecycle.jobs.read("j").reason == "", "it is queued still"
    lifecycle.jobs.start("j")
    for reason in ("waits for GPUs", ""):
        lifecycle.jobs.set_waiting_reason("j", reason, "running")
        assert lifecycle.jobs.read("j").reason == reason
    lifecycle.jobs.fail("j", "its code is wrong")
    lifecycle.jobs.set_waiting_reason("j", "", "running")
    assert lifecycle.jobs.read("j").reason == "its code is wrong"


def test_an_equal_evaluation_writes_no_second_event(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    for _ in range(2):
        with lifecycle.database.write() as connection:
            lifecycle.jobs.set_evaluation(connection, "j", EVALUATION)
    assert lifecycle.jobs.read("j").evaluation == EVALUATION
    assert lifecycle.types().count("evaluation.completed") == 1


def test_rolled_back_change_has_no_event(lifecycle: JobLifecycle) -> None:
    lifecycle.submit()
    lifecycle.jobs.start("j")
    with pytest.raises(RuntimeError), lifecycle.database.write() as connection:
        lifecycle.jobs.complete(connection, "j", {"adapter": ADAPTER}, 1.0)
        raise RuntimeError
    assert lifecycle.status() == ("running", "running")
    assert lifecycle.types() == ["job.submitted", "job.started"]


@pytest.mark.parametrize("change", ["read", "start", "cancel"])
def test_change_of_an_unknown_job_is_refused_with_not_found(lifecycle: JobLifecycle, change: str) -> None:
    with pytest.raises(HanzoError, match="there is no job 'nobody'") as caught:
        getattr(lifecycle.jobs, change)("nobody")
    assert caught.value.code is ErrorCode.RESOURCE_DOES_NOT_EXIST


@pytest.mark.requirement("G6")
def test_jobs_are_listed_by_status_and_organization_newest_first(lifecycle: JobLifecycle) -> None:
    lifecycle.submit("first")
    lifecycle.submit("second")
    lifecycle.jobs.submit(name="n", config={}, user="u", organization="other", id="theirs")
    lifecycle.jobs.start("first")
    assert {job.id for job in lifecycle.jobs.page("default")[0]} == {"first", "second"}
    assert [job.id for job in lifecycle.jobs.page("default", "running")[0]] == ["first"]
    submitted = [job.submitted_at for job in lifecycle.jobs.page("default")[0]]
    assert submitted == sorted(submitted, reverse=True)
    with pytest.raises(HanzoError, match="status 'runing' is unknown: use one of queued"):
        lifecycle.jobs.page("default", "runing")


def test_pages_have_each_job_once_even_with_equal_submission_times(lifecycle: JobLifecycle) -> None:
    for id in "abcde":
        lifecycle.submit(id)
    with lifecycle.database.write() as connection:
        connection.execute(update(table).where(table.c.id.in_(["b", "c", "d"])).values(submitted_at=7))
    whole, nothing_more = lifecycle.jobs.page("default")
    seen: list[JobRecord] = []
    token: str | None = None
    while not seen or token:
        found, token = lifecycle.jobs.page("default", limit=2, page_token=token)
        assert len(found) == min(2, 5 - len(seen))
        seen.extend(found)
        lifecycle.submit(f"later-{len(seen)}")  # jobs submitted meanwhile do not shift the pages
    assert (seen, nothing_more) == (whole, None)
    _, token = lifecycle.jobs.page("default", limit=1)
    with pytest.raises(HanzoError, match="page token"):
        lifecycle.jobs.page("other", page_token=token)


def test_deleted_job_is_unlisted_and_keeps_its_record(lifecycle: JobLifecycle) -> None:
    lifecycle.submit("kept")
    lifecycle.submit()
    with pytest.raises(HanzoError, match="job 'j' is queued: cancel it first"):
        lifecycle.jobs.delete("j")
    lifecycle.jobs.start("j")
    lifecycle.complete()
    for _ in range(2):
        lifecycle.jobs.delete("j")
    assert [job.id for job in lifecycle.jobs.page("default")[0]] == ["kept"]
    assert lifecycle.jobs.page("default", "completed") == ([], None)
    assert lifecycle.jobs.read("j").artifact("adapter") == ADAPTER
    assert lifecycle.types().count("job.deleted") == 1


@pytest.mark.parametrize("end", ["failed", "cancelled", "completed"])
def test_job_with_a_deleted_run_starts_and_ends_normally(lifecycle: JobLifecycle, end: str) -> None:
    lifecycle.submit()
    Runs(lifecycle.database).delete("j")
    lifecycle.jobs.start("j")
    assert lifecycle.status() == ("running", "running")
    match end:
        case "failed":
            lifecycle.jobs.fail("j", "no room")
        case "cancelled":
            lifecycle.jobs.cancel("j")
        case _:
            lifecycle.complete()
    assert lifecycle.status() == (end, end)
    assert Runs(lifecycle.database).get("j").lifecycle_stage == "deleted"


def test_job_completing_concurrently_is_not_cancelled(lifecycle: JobLifecycle) -> None:
    """The cancellation waits for the other transaction's commit and then sees the completed job."""
    lifecycle.submit()
    lifecycle.jobs.start("j")
    refused: list[str] = []

    def cancel() -> None:
        try:
            lifecycle.jobs.cancel("j")
        except HanzoError as error:
            refused.append(error.message)

    second = threading.Thread(target=cancel)
    with lifecycle.database.write() as connection:
        lifecycle.jobs.complete(connection, "j", {}, 1.5)
        second.start()
        second.join(0.3)
        assert second.is_alive()
    second.join(30)
    assert refused == ["job 'j' is completed already"]
    assert lifecycle.status() == ("completed", "completed")
    assert lifecycle.types()[-1] == "job.completed"
