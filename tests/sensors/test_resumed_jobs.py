"""A resumed job starts once after earlier work has stopped, and stays resumed."""

import time

import dagster as dg
import pytest

from resources.metadata.job_record import ResumeHistory
from sensors.start_submitted_jobs import RUN_KEY_TAG, start_submitted_jobs
from sensors.stop_cancelled_jobs import stop_cancelled_jobs
from tests.support.sensors.sensor_harness import SensorHarness, harness, repository

__all__ = ["harness", "repository"]
STARTED = dg.DagsterRunStatus.STARTED


def run_of(harness: SensorHarness, job: str, status: dg.DagsterRunStatus, **tags: str) -> str:
    tags = {"dagster/partition": job, **tags}
    run = harness.instance.add_run(dg.DagsterRun(job_name="__ASSET_JOB", status=status, tags=tags))
    return str(run.run_id)


def resume(harness: SensorHarness, job: str, times: int = 1) -> None:
    harness.plane.jobs.resume(job, ResumeHistory(times=times), {})


def run_keys(harness: SensorHarness) -> list[str | None]:
    return [request.run_key for request in harness.tick(start_submitted_jobs)]


def test_each_resume_starts_a_separate_run(harness: SensorHarness) -> None:
    harness.dataset()
    harness.submit("job-1")
    assert run_keys(harness) == ["job-1"]
    harness.plane.jobs.start("job-1")
    for times in (1, 2):
        harness.plane.jobs.fail("job-1", "no room")
        resume(harness, "job-1", times)
        assert run_keys(harness) == [f"job-1-{times}"] == run_keys(harness)
        harness.plane.jobs.start("job-1")
        assert run_keys(harness) == []


def test_resumed_job_waits_until_the_cancelled_run_has_ended(harness: SensorHarness) -> None:
    """Otherwise two programs would write the checkpoints of one run."""
    harness.dataset()
    harness.submit("job-1")
    for status in (STARTED, dg.DagsterRunStatus.CANCELING):
        run_of(harness, "job-1", status, **{RUN_KEY_TAG: "job-1"})
    harness.plane.jobs.cancel("job-1")
    resume(harness, "job-1")
    assert run_keys(harness) == []
    assert harness.plane.jobs.read("job-1").reason == "waits until what ran before it was resumed has ended"
    for run in harness.instance.get_runs():
        harness.instance.delete_run(run.run_id)
    run_of(harness, "job-1", dg.DagsterRunStatus.CANCELED, **{RUN_KEY_TAG: "job-1"})
    assert run_keys(harness) == ["job-1-1"]
    run_of(harness, "job-1", STARTED, **{RUN_KEY_TAG: "job-1-1"})
    assert run_keys(harness) == ["job-1-1"], "it waits for no run but those from before"


def test_only_the_run_from_before_the_resume_is_cancelled(harness: SensorHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sensor may run only after both have happened."""
    harness.submit("job-1")
    old = run_of(harness, "job-1", STARTED)
    time.sleep(0.01)
    harness.plane.jobs.cancel("job-1")
    resume(harness, "job-1")
    time.sleep(0.01)
    run_of(harness, "job-1", STARTED)
    ended: list[str] = []
    monkeypatch.setattr(harness.instance.run_coordinator, "cancel_run", ended.append)
    harness.tick(stop_cancelled_jobs)
    assert ended == [old]
