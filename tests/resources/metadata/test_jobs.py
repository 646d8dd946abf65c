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


class House:
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
def house(database: Database) -> House:
    return House(database)


def test_a_submitted_job_is_queued_and_has_a_tracking_run_of_its_id(house: House) -> None:
    job = house.submit()
    assert (job.status, job.started_at, job.ended_at, job.reason, job.artifacts) == ("queued", None, None, "", {})
    assert house.status() == ("queued", "queued")
    assert house.jobs.submit(name="n", config={}, user="ann", organization="default").id != job.id


@pytest.mark.requirement("Q1")
def test_the_events_have_the_fields_of_the_specification(house: House) -> None:
    house.submit()
    house.jobs.start("j")
    house.complete()
    house.submit("k")
    house.jobs.fail("k", "no room")
    found = {event.type: event for event in house.events()}
    assert {"job_id", "user_id", "config", "timestamp"} <= set(found["job.submitted"].payload)
    assert found["job.submitted"].payload["config"]["recipe"] == "r"
    assert {"job_id", "node_ids", "gpu_ids", "timestamp"} <= set(found["job.started"].payload)
    assert {"job_id", "duration", "gpu_hours", "timestamp"} <= set(found["job.completed"].payload)
    assert found["job.failed"].payload["error"] == "no room"
    assert {event.topic for event in found.values() if event.type.startswith("job.")} == {"jobs"}
    assert found["job.failed"].key == "k"


def test_a_job_that_is_submitted_again_stays_as_it_is(house: House) -> None:
    house.submit()
    house.jobs.start("j")
    again = house.submit()
    assert again.status == "running"
    assert house.types() == ["job.submitted", "job.started"]


def test_a_supervisor_that_comes_back_does_not_start_the_job_again(house: House) -> None:
    house.submit()
    first = house.jobs.start("j")
    assert house.jobs.start("j") == first
    assert house.types() == ["job.submitted", "job.started"]


def test_job_completes_once_with_its_artifacts(house: House) -> None:
    house.submit()
    house.jobs.start("j")
    house.complete()
    before = house.jobs.read("j")
    house.complete()
    assert house.jobs.read("j") == before
    assert before.artifact("adapter") == ADAPTER
    assert house.status() == ("completed", "completed")
    assert house.types() == ["job.submitted", "job.started", "job.completed"]


def test_failed_job_keeps_its_first_reason(house: House) -> None:
    house.submit()
    house.jobs.fail("j", "no room")
    house.jobs.fail("j", "another reason")
    assert house.jobs.read("j").reason == "no room"
    assert house.status() == ("failed", "failed")
    assert house.types() == ["job.submitted", "job.failed"]


def test_restarted_failed_job_has_no_reason_and_no_end_time(house: House) -> None:
    house.submit()
    house.jobs.start("j")
    house.jobs.fail("j", "no room")
    job = house.jobs.start("j")
    assert (job.status, job.reason, job.ended_at) == ("running", "", None)
    assert house.status() == ("running", "running")


def test_completed_job_cannot_fail_afterwards(house: House) -> None:
    house.submit()
    house.jobs.start("j")
    house.complete()
    house.jobs.fail("j", "too late")
    assert house.status() == ("completed", "completed")


def test_a_cancelled_job_does_not_start_and_is_not_cancelled_twice(house: House) -> None:
    house.submit()
    assert house.jobs.cancel("j").status == "cancelled"
    for change in (house.jobs.start, house.jobs.cancel):
        with pytest.raises(HanzoError, match="cancelled"):
            change("j")
    assert house.status() == ("cancelled", "cancelled")
    assert house.types() == ["job.submitted", "job.cancelled"]


def test_a_cancelled_job_does_not_turn_into_a_completed_one(house: House) -> None:
    """The program ended during cancellation: a cancelled job is not evaluated, registered or exported."""
    house.submit()
    house.jobs.start("j")
    house.jobs.cancel("j")
    with suppress(HanzoError):
        house.complete()
    assert house.status() == ("cancelled", "cancelled")
    assert "job.completed" not in house.types()


def test_a_job_that_has_ended_cannot_be_cancelled(house: House) -> None:
    house.submit()
    house.jobs.start("j")
    house.complete()
    with pytest.raises(HanzoError, match="completed already"):
        house.jobs.cancel("j")


def test_job_recorded_as_running_has_started(house: House) -> None:
    job = house.submit(status="running")
    assert job.status == "running" and job.started_at is not None
    assert house.status() == ("running", "running")


def test_waiting_reason_of_a_queued_job_is_dropped_at_its_start(house: House) -> None:
    house.submit()
    house.jobs.set_waiting_reason("j", "waits for the splits")
    assert house.jobs.read("j").reason == "waits for the splits"
    house.jobs.start("j")
    house.jobs.set_waiting_reason("j", "waits for the splits")
    assert house.jobs.read("j").reason == ""


def test_waiting_reason_of_a_running_job_is_set_only_while_it_runs(house: House) -> None:
    house.submit()
    house.jobs.set_waiting_reason("j", "waits for GPUs", "running")
    assert house.jobs.read("j").reason == "", "it is queued still"
    house.jobs.start("j")
    for reason in ("waits for GPUs", ""):
        house.jobs.set_waiting_reason("j", reason, "running")
        assert house.jobs.read("j").reason == reason
    house.jobs.fail("j", "its code is wrong")
    house.jobs.set_waiting_reason("j", "", "running")
    assert house.jobs.read("j").reason == "its code is wrong"


def test_an_equal_evaluation_writes_no_second_event(house: House) -> None:
    house.submit()
    for _ in range(2):
        with house.database.write() as connection:
            house.jobs.set_evaluation(connection, "j", EVALUATION)
    assert house.jobs.read("j").evaluation == EVALUATION
    assert house.types().count("evaluation.completed") == 1


def test_rolled_back_change_has_no_event(house: House) -> None:
    house.submit()
    house.jobs.start("j")
    with pytest.raises(RuntimeError), house.database.write() as connection:
        house.jobs.complete(connection, "j", {"adapter": ADAPTER}, 1.0)
        raise RuntimeError
    assert house.status() == ("running", "running")
    assert house.types() == ["job.submitted", "job.started"]


@pytest.mark.parametrize("change", ["read", "start", "cancel"])
def test_change_of_an_unknown_job_is_refused_with_not_found(house: House, change: str) -> None:
    with pytest.raises(HanzoError, match="there is no job 'nobody'") as caught:
        getattr(house.jobs, change)("nobody")
    assert caught.value.code is ErrorCode.RESOURCE_DOES_NOT_EXIST


@pytest.mark.requirement("G6")
def test_jobs_are_listed_by_status_and_organization_newest_first(house: House) -> None:
    house.submit("first")
    house.submit("second")
    house.jobs.submit(name="n", config={}, user="u", organization="other", id="theirs")
    house.jobs.start("first")
    assert {job.id for job in house.jobs.page("default")[0]} == {"first", "second"}
    assert [job.id for job in house.jobs.page("default", "running")[0]] == ["first"]
    submitted = [job.submitted_at for job in house.jobs.page("default")[0]]
    assert submitted == sorted(submitted, reverse=True)
    with pytest.raises(HanzoError, match="status 'runing' is unknown: use one of queued"):
        house.jobs.page("default", "runing")


def test_pages_have_each_job_once_even_with_equal_submission_times(house: House) -> None:
    for id in "abcde":
        house.submit(id)
    with house.database.write() as connection:
        connection.execute(update(table).where(table.c.id.in_(["b", "c", "d"])).values(submitted_at=7))
    whole, nothing_more = house.jobs.page("default")
    seen: list[JobRecord] = []
    token: str | None = None
    while not seen or token:
        found, token = house.jobs.page("default", limit=2, page_token=token)
        assert len(found) == min(2, 5 - len(seen))
        seen.extend(found)
        house.submit(f"later-{len(seen)}")  # jobs submitted meanwhile do not shift the pages
    assert (seen, nothing_more) == (whole, None)
    _, token = house.jobs.page("default", limit=1)
    with pytest.raises(HanzoError, match="page token"):
        house.jobs.page("other", page_token=token)


def test_deleted_job_is_unlisted_and_keeps_its_record(house: House) -> None:
    house.submit("kept")
    house.submit()
    with pytest.raises(HanzoError, match="job 'j' is queued: cancel it first"):
        house.jobs.delete("j")
    house.jobs.start("j")
    house.complete()
    for _ in range(2):
        house.jobs.delete("j")
    assert [job.id for job in house.jobs.page("default")[0]] == ["kept"]
    assert house.jobs.page("default", "completed") == ([], None)
    assert house.jobs.read("j").artifact("adapter") == ADAPTER
    assert house.types().count("job.deleted") == 1


@pytest.mark.parametrize("end", ["failed", "cancelled", "completed"])
def test_job_with_a_deleted_run_starts_and_ends_normally(house: House, end: str) -> None:
    house.submit()
    Runs(house.database).delete("j")
    house.jobs.start("j")
    assert house.status() == ("running", "running")
    match end:
        case "failed":
            house.jobs.fail("j", "no room")
        case "cancelled":
            house.jobs.cancel("j")
        case _:
            house.complete()
    assert house.status() == (end, end)
    assert Runs(house.database).get("j").lifecycle_stage == "deleted"


def test_job_completing_concurrently_is_not_cancelled(house: House) -> None:
    """The cancellation waits for the other transaction's commit and then sees the completed job."""
    house.submit()
    house.jobs.start("j")
    refused: list[str] = []

    def cancel() -> None:
        try:
            house.jobs.cancel("j")
        except HanzoError as error:
            refused.append(error.message)

    second = threading.Thread(target=cancel)
    with house.database.write() as connection:
        house.jobs.complete(connection, "j", {}, 1.5)
        second.start()
        second.join(0.3)
        assert second.is_alive()
    second.join(30)
    assert refused == ["job 'j' is completed already"]
    assert house.status() == ("completed", "completed")
    assert house.types()[-1] == "job.completed"
