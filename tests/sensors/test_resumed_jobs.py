"""A resumed job starts once after earlier work has stopped, and stays resumed."""

import time

import dagster as dg
import pytest

from resources.metadata.job_record import ResumeHistory
from sensors.start_submitted_jobs import RUN_KEY_TAG, start_submitted_jobs
from sensors.stop_cancelled_jobs import stop_cancelled_jobs
from tests.support.sensors.sensor_house import House, house, repository

__all__ = ["house", "repository"]
STARTED = dg.DagsterRunStatus.STARTED


def run_of(house: House, job: str, status: dg.DagsterRunStatus, **tags: str) -> str:
    tags = {"dagster/partition": job, **tags}
    run = house.instance.add_run(dg.DagsterRun(job_name="__ASSET_JOB", status=status, tags=tags))
    return str(run.run_id)


def resume(house: House, job: str, times: int = 1) -> None:
    house.plane.jobs.resume(job, ResumeHistory(times=times), {})


def run_keys(house: House) -> list[str | None]:
    return [request.run_key for request in house.tick(start_submitted_jobs)]


def test_each_resume_starts_a_separate_run(house: House) -> None:
    house.dataset()
    house.submit("job-1")
    assert run_keys(house) == ["job-1"]
    house.plane.jobs.start("job-1")
    for times in (1, 2):
        house.plane.jobs.fail("job-1", "no room")
        resume(house, "job-1", times)
        assert run_keys(house) == [f"job-1-{times}"] == run_keys(house)
        house.plane.jobs.start("job-1")
        assert run_keys(house) == []


def test_resumed_job_waits_until_the_cancelled_run_has_ended(house: House) -> None:
    """Otherwise two programs would write the checkpoints of one run."""
    house.dataset()
    house.submit("job-1")
    for status in (STARTED, dg.DagsterRunStatus.CANCELING):
        run_of(house, "job-1", status, **{RUN_KEY_TAG: "job-1"})
    house.plane.jobs.cancel("job-1")
    resume(house, "job-1")
    assert run_keys(house) == []
    assert house.plane.jobs.read("job-1").reason == "waits until what ran before it was resumed has ended"
    for run in house.instance.get_runs():
        house.instance.delete_run(run.run_id)
    run_of(house, "job-1", dg.DagsterRunStatus.CANCELED, **{RUN_KEY_TAG: "job-1"})
    assert run_keys(house) == ["job-1-1"]
    run_of(house, "job-1", STARTED, **{RUN_KEY_TAG: "job-1-1"})
    assert run_keys(house) == ["job-1-1"], "it waits for no run but those from before"


def test_only_the_run_from_before_the_resume_is_cancelled(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sensor may run only after both have happened."""
    house.submit("job-1")
    old = run_of(house, "job-1", STARTED)
    time.sleep(0.01)
    house.plane.jobs.cancel("job-1")
    resume(house, "job-1")
    time.sleep(0.01)
    run_of(house, "job-1", STARTED)
    ended: list[str] = []
    monkeypatch.setattr(house.instance.run_coordinator, "cancel_run", ended.append)
    house.tick(stop_cancelled_jobs)
    assert ended == [old]
