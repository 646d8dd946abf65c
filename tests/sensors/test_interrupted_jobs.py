"""Jobs whose run, worker or program ended alone: cancelled ones stop, none runs forever."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path

import dagster as dg
import pytest

from resources.compute.local.backend import LocalCompute
from resources.metadata.job_record import ResumeHistory
from resources.orchestration.process_launcher import ProcessRunLauncher
from resources.stack.detached_process import LOG_FILE, is_running, lock_folder, start_detached, stop_process
from sensors.cancel_terminated_jobs import cancel_terminated_jobs
from sensors.decisions.retry_policy import FAILURE_REASON_TAG, MAX_RETRIES, RETRIED_RUN_TAG, RETRIES_TAG
from sensors.retry_dead_runs import retry_dead_runs
from sensors.start_submitted_jobs import RUN_KEY_TAG, start_submitted_jobs
from sensors.stop_cancelled_jobs import stop_cancelled_jobs
from tests.end_to_end.local_stack import wait_until
from tests.support.sensors.interrupted_runs import CANCELED, FAILURE, run_of
from tests.support.sensors.sensor_harness import SensorHarness, harness, repository

__all__ = ["harness", "repository"]

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def resume(harness: SensorHarness, job: str, times: int = 1) -> None:
    harness.plane.jobs.resume(job, ResumeHistory(times=times), {})
    time.sleep(0.01)


@pytest.fixture
def program(harness: SensorHarness) -> Iterator[Path]:
    """Start the program of `job-1` without its worker."""
    yield from working(harness, ["sleep", "600"])


def working(harness: SensorHarness, command: list[str]) -> Iterator[Path]:
    folder = harness.plane.settings.home / "jobs" / "job-1" / "train"
    folder.mkdir(parents=True)
    with lock_folder(folder) as descriptor:
        assert descriptor is not None
        start_detached(command, folder, descriptor, cwd=None, env={})
    yield folder
    stop_process(folder, 0)


def is_deaf(folder: Path) -> bool:
    return "deaf" in (folder / LOG_FILE).read_text()


def ends(folder: Path) -> bool:
    end = time.monotonic() + 20
    while is_running(folder) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_running(folder)


@pytest.mark.parametrize("status", ["cancelled", "failed"])
def test_the_program_of_a_dead_worker_ends_with_its_job(harness: SensorHarness, program: Path, status: str) -> None:
    harness.submit("job-1")
    harness.plane.jobs.start("job-1")
    run_of(harness, "job-1", FAILURE)
    harness.tick(stop_cancelled_jobs)
    assert is_running(program), "its job runs"
    harness.plane.jobs.cancel("job-1") if status == "cancelled" else harness.plane.jobs.fail("job-1", "reason")
    harness.tick(stop_cancelled_jobs)
    assert ends(program)


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING])
def test_program_with_a_live_worker_is_left_for_the_worker_to_stop(
    harness: SensorHarness, program: Path, status: dg.DagsterRunStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker gives it time to save a checkpoint, and follows its log until then."""
    monkeypatch.setattr(harness.instance.run_coordinator, "cancel_run", lambda run: True)
    harness.submit("job-1")
    run_of(harness, "job-1", status)
    harness.plane.jobs.cancel("job-1")
    harness.tick(stop_cancelled_jobs)
    time.sleep(0.2)
    assert is_running(program)


@pytest.mark.parametrize(("alive", "status"), [(True, dg.DagsterRunStatus.CANCELING), (False, CANCELED)])
def test_run_whose_worker_died_while_cancelling_is_marked_ended(
    harness: SensorHarness, alive: bool, status: dg.DagsterRunStatus
) -> None:
    """Resuming its job waited five minutes for a worker that no longer existed."""
    harness.submit("job-1")
    harness.plane.jobs.cancel("job-1")
    resume(harness, "job-1")
    launcher = ProcessRunLauncher(str(harness.folder))
    launcher.register_instance(harness.instance)
    harness.instance._run_launcher = launcher
    run = run_of(harness, "job-1", dg.DagsterRunStatus.CANCELING)
    (harness.folder / run).mkdir()
    with lock_folder(harness.folder / run) if alive else nullcontext():
        assert harness.tick(start_submitted_jobs) == []
    found = harness.instance.get_run_by_id(run)
    assert found is not None and found.status == status


def test_program_ignoring_sigterm_is_killed_after_its_grace_period(harness: SensorHarness) -> None:
    compute = harness.plane.compute
    assert isinstance(compute, LocalCompute)
    for folder in working(harness, [sys.executable, "-c", STUBBORN]):
        harness.submit("job-1")
        harness.plane.jobs.cancel("job-1")
        wait_until("a program that ignores SIGTERM", partial(is_deaf, folder), every=0.01)
        harness.tick(stop_cancelled_jobs)
        harness.tick(stop_cancelled_jobs)
        time.sleep(0.2)
        assert is_running(folder), "its grace is not over"
        compute.grace_seconds = 0.1
        harness.tick(stop_cancelled_jobs)
        assert ends(folder)


def test_resumed_job_waits_for_the_orphaned_program_to_end(harness: SensorHarness, program: Path) -> None:
    """Otherwise it would attach to that program, and ignore the requested checkpoint."""
    harness.dataset()
    harness.submit("job-1")
    run_of(harness, "job-1", FAILURE, **{RUN_KEY_TAG: "job-1"})
    harness.plane.jobs.cancel("job-1")
    resume(harness, "job-1")
    assert harness.tick(start_submitted_jobs) == []
    assert harness.plane.jobs.read("job-1").reason == "waits until what ran before it was resumed has ended"
    assert ends(program)
    (request,) = harness.tick(start_submitted_jobs)
    assert request.run_key == "job-1-1"


def test_program_of_the_resumed_run_is_not_mistaken_for_an_orphan(harness: SensorHarness, program: Path) -> None:
    harness.dataset()
    harness.submit("job-1")
    harness.plane.jobs.cancel("job-1")
    resume(harness, "job-1")
    run_of(harness, "job-1", dg.DagsterRunStatus.STARTED, **{RUN_KEY_TAG: "job-1-1"})
    assert [request.run_key for request in harness.tick(start_submitted_jobs)] == ["job-1-1"]
    time.sleep(0.2)
    assert is_running(program)


def retried(harness: SensorHarness) -> list[str]:
    return [str(request.partition_key) for request in harness.tick(retry_dead_runs)]


def test_dead_run_is_retried_once_unless_its_job_was_cancelled(harness: SensorHarness) -> None:
    for job in ("runs", "cancelled", "resumed", "completed", "goes-on"):
        harness.submit(job)
        harness.plane.jobs.start(job)
        dead = run_of(harness, job, FAILURE)
    run_of(harness, "goes-on", dg.DagsterRunStatus.STARTED, **{RETRIED_RUN_TAG: dead})
    harness.complete("completed")
    for job in ("cancelled", "resumed"):
        harness.plane.jobs.cancel(job)
    resume(harness, "resumed")
    run_of(harness, "before-its-job", FAILURE)
    run_of(harness, "completed", FAILURE, "evaluation")
    assert sorted(retried(harness)) == ["before-its-job", "completed", "completed", "runs"]


@pytest.mark.parametrize(("saved", "retries"), [(False, "20"), (True, "1")])
def test_retry_count_resets_only_after_a_new_checkpoint(harness: SensorHarness, saved: bool, retries: str) -> None:
    """A training of weeks failed when its stack was stopped for the twenty-first time."""

    def save(step: int, seconds: int) -> None:
        """Save a checkpoint this many seconds from now: object times are in seconds."""
        uri = f"s3://hanzo-ml/checkpoints/job-1/{step}/manifest.json"
        harness.plane.store.put_bytes(uri, b"{}")
        path = harness.plane.store.local_path(uri)
        assert path is not None
        os.utime(path, (time.time() + seconds, time.time() + seconds))

    save(4, -2)
    harness.submit("job-1")
    harness.plane.jobs.start("job-1")
    run_of(harness, "job-1", FAILURE, **{RETRIES_TAG: "19"})
    if saved:
        save(8, 2)
    (request,) = harness.tick(retry_dead_runs)
    assert request.tags[RETRIES_TAG] == retries


def test_retry_count_resets_while_the_program_keeps_running(harness: SensorHarness, program: Path) -> None:
    harness.submit("job-1")
    harness.plane.jobs.start("job-1")
    run_of(harness, "job-1", FAILURE, **{RETRIES_TAG: "19"})
    (request,) = harness.tick(retry_dead_runs)
    assert is_running(program) and request.tags[RETRIES_TAG] == "1"


def test_dead_run_is_retried_after_the_clock_was_set_back(harness: SensorHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ignored until the clock had passed its time of death again."""
    harness.submit("job-1")
    harness.plane.jobs.start("job-1")
    run_of(harness, "job-1", FAILURE)

    class AnHourAgo(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(hours=1)

    monkeypatch.setattr("sensors.retry_dead_runs.datetime", AnHourAgo)
    assert [request.partition_key for request in harness.tick(retry_dead_runs)] == ["job-1"]


def test_job_fails_when_its_worker_died_too_often(harness: SensorHarness) -> None:
    """Otherwise a job that kills each of its workers would be restarted endlessly."""
    for job, tried in (("last", MAX_RETRIES - 1), ("often", MAX_RETRIES)):
        harness.submit(job)
        harness.plane.jobs.start(job)
        run_of(harness, job, FAILURE, **{RETRIES_TAG: str(tried)})
    assert retried(harness) == ["last"]
    job = harness.plane.jobs.read("often")
    assert job.status == "failed" and job.reason.startswith("its run failed: its worker died (run ")


def test_job_fails_when_its_run_failed_before_starting_it(harness: SensorHarness) -> None:
    harness.submit("job-1")
    run = run_of(harness, "job-1", FAILURE, **{FAILURE_REASON_TAG: "STEP_FAILURE"})
    assert retried(harness) == []
    job = harness.plane.jobs.read("job-1")
    assert job.status == "failed" and run in job.reason
    resume(harness, "job-1")
    assert retried(harness) == []
    assert harness.plane.jobs.read("job-1").status == "queued", "that was the run of the time before"


@pytest.mark.parametrize("started", [True, False])
def test_terminating_a_run_in_dagster_cancels_its_job(harness: SensorHarness, started: bool) -> None:
    harness.submit("job-1")
    if started:
        harness.plane.jobs.start("job-1")
    run = run_of(harness, "job-1", CANCELED)
    harness.tick(cancel_terminated_jobs)
    job = harness.plane.jobs.read("job-1")
    assert (job.status, job.reason) == ("cancelled", f"its run was terminated in Dagster (run {run})")
    resume(harness, "job-1")
    harness.tick(cancel_terminated_jobs)
    assert harness.plane.jobs.read("job-1").status == "queued", "that was the run of the time before"
    run_of(harness, "job-1", CANCELED)
    harness.tick(cancel_terminated_jobs)
    assert harness.plane.jobs.read("job-1").status == "cancelled"


def test_terminated_run_does_not_cancel_a_job_that_another_run_serves(harness: SensorHarness) -> None:
    for job in ("retried", "completed", "never-started"):
        harness.submit(job)
    harness.plane.jobs.start("retried")
    harness.complete("completed")
    for job in ("retried", "completed"):
        run_of(harness, job, CANCELED)
    run_of(harness, "retried", dg.DagsterRunStatus.STARTED)
    harness.tick(cancel_terminated_jobs)
    statuses = {job: harness.plane.jobs.read(job).status for job in ("retried", "completed", "never-started")}
    assert statuses == {"retried": "running", "completed": "completed", "never-started": "queued"}


@pytest.mark.parametrize("end", [dg.DagsterEventType.RUN_FAILURE, dg.DagsterEventType.RUN_CANCELED])
def test_resumed_job_ends_with_a_run_queued_before_the_resume(harness: SensorHarness, end: dg.DagsterEventType) -> None:
    """A failed training was launched again in Dagster and resumed: it ran forever."""
    harness.submit("job-1")
    harness.plane.jobs.fail("job-1", "no room")
    run = run_of(harness, "job-1", dg.DagsterRunStatus.NOT_STARTED, **{FAILURE_REASON_TAG: "STEP_FAILURE"})
    resume(harness, "job-1")
    harness.instance.report_dagster_event(dg.DagsterEvent(dg.DagsterEventType.RUN_START.value, "__ASSET_JOB"), run)
    harness.plane.jobs.start("job-1")
    harness.instance.report_dagster_event(dg.DagsterEvent(end.value, "__ASSET_JOB"), run)
    assert retried(harness) == []
    harness.tick(cancel_terminated_jobs)
    job = harness.plane.jobs.read("job-1")
    assert job.status in ("failed", "cancelled") and run in job.reason
