"""A command job starts once in its partition, and no training sensor handles it."""

import os
from pathlib import Path

import dagster as dg
import pytest
from sqlalchemy import update

from hanzo_ml_assets.command import COMMAND_PARTITIONS
from recipes.contracts.command_job import CommandJob
from recipes.contracts.results import Usage, write_usage
from resources.jobs.command import submit_command
from resources.metadata.jobs import JobRecord
from resources.metadata.outbox import Event, now_ms, read_after
from resources.metadata.tables import events
from sensors.decisions.retry_policy import (
    FAILURE_REASON_TAG,
    RETRY_TAG,
    can_retry_dead_worker,
    is_retried,
    make_retry_request,
)
from sensors.evaluate_completed_jobs import evaluate_completed_jobs
from sensors.start_submitted_jobs import start_submitted_jobs
from sensors.start_submitted_preparations import start_submitted_preparations
from sensors.stop_cancelled_jobs import stop_cancelled_jobs
from sensors.watch_training import check_command, watch_training
from tests.support.sensors.sensor_harness import SensorHarness, harness, keys, repository

__all__ = ["harness", "repository"]  # fixtures


def submit(harness: SensorHarness, **keys: str) -> JobRecord:
    asked = CommandJob.model_validate({"name": "mine", "command": ["python", "train.py"], **keys})
    return submit_command(harness.plane.database, harness.plane.store, asked, "ann", "default")


def test_command_job_starts_once_in_the_partition_of_its_id(harness: SensorHarness) -> None:
    job = submit(harness)
    (request,) = harness.tick(start_submitted_jobs)
    assert (request.run_key, request.partition_key, keys(request)) == (job.id, job.id, ["jobs/command"])
    assert harness.instance.has_dynamic_partition(COMMAND_PARTITIONS, job.id)
    assert harness.tick(start_submitted_preparations) == []
    harness.plane.jobs.start(job.id)
    assert harness.tick(start_submitted_jobs) == []


@pytest.mark.parametrize("ended", ["cancelled", "failed", "completed"])
def test_ended_command_job_is_not_started(harness: SensorHarness, ended: str) -> None:
    job = submit(harness)
    if ended == "cancelled":
        harness.plane.jobs.cancel(job.id)
    elif ended == "failed":
        harness.plane.jobs.fail(job.id, "reason")
    else:
        harness.complete(job.id)
    assert harness.tick(start_submitted_jobs) == []


def test_training_job_starts_alongside_a_command_job(harness: SensorHarness) -> None:
    harness.dataset()
    job = submit(harness)
    harness.submit("trains")
    assert {request.run_key for request in harness.tick(start_submitted_jobs)} == {job.id, "trains"}


@pytest.mark.parametrize(
    ("type", "saved", "late_at"), [("training", False, 91), ("training", True, 121), ("eval", True, 121)]
)
def test_stale_checkpoint_of_a_command_job_is_reported_once(
    harness: SensorHarness, type: str, saved: bool, late_at: int
) -> None:
    """Those of training runs were; a command continued for days without a usable checkpoint."""
    job = submit(harness, type=type)
    harness.plane.jobs.start(job.id)
    place, began = f"s3://hanzo-ml/checkpoints/{job.id}", now_ms()
    write_usage(harness.plane.store, f"s3://hanzo-ml/runs/{job.id}", Usage(seconds=1e-3))
    if saved:
        harness.plane.store.put_bytes(f"{place}/state-1-0123456789ab/manifest.json", b"{}")
        state = Path(harness.plane.store.local_path(f"{place}/state-1-0123456789ab/manifest.json") or "")
        os.utime(state, times=(began / 1000 + 1800, began / 1000 + 1800))
    for minutes in (1, 89, late_at - 2, late_at, late_at + 100):
        check_command(harness.plane.jobs.read(job.id), harness.plane, began + minutes * 60_000)
        if minutes < late_at:
            assert stale_events(harness, job) == []
    assert len(stale_events(harness, job)) == 1


def test_checkpoint_age_counts_running_time_and_not_queue_time(
    harness: SensorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was queued for a day, and ran for one of 90 minutes."""
    job = submit(harness, type="training")
    harness.plane.jobs.start(job.id)
    with harness.plane.database.write() as connection:
        connection.execute(update(events).values(created_at=now_ms() - 86_400_000))
    write_usage(harness.plane.store, f"s3://hanzo-ml/runs/{job.id}", Usage(seconds=60.0))
    harness.tick(watch_training)
    assert stale_events(harness, job) == []
    write_usage(harness.plane.store, f"s3://hanzo-ml/runs/{job.id}", Usage(seconds=5460.0))
    harness.tick(watch_training)
    assert len(stale_events(harness, job)) == 1


@pytest.mark.parametrize(("type", "seconds"), [("training", 0.0), ("eval", 1.0)])
def test_waiting_or_checkpointless_command_job_is_not_reported_stale(
    harness: SensorHarness, type: str, seconds: float
) -> None:
    job = submit(harness, type=type)
    harness.plane.jobs.start(job.id)
    write_usage(harness.plane.store, f"s3://hanzo-ml/runs/{job.id}", Usage(seconds=seconds))
    check_command(harness.plane.jobs.read(job.id), harness.plane, now_ms() + 86_400_000)
    assert harness.tick(watch_training) == []
    assert stale_events(harness, job) == []


def stale_events(harness: SensorHarness, job: JobRecord) -> list[Event]:
    with harness.plane.database.read() as connection:
        return [event for event in read_after(connection, 0, ["job.checkpoint_stale"]) if event.key == job.id]


def test_completed_command_job_is_not_evaluated(harness: SensorHarness) -> None:
    job = submit(harness)
    harness.plane.jobs.start(job.id)
    harness.complete(job.id)
    assert harness.tick(evaluate_completed_jobs) == []
    assert harness.plane.jobs.read(job.id).reason == ""


def dagster_run(harness: SensorHarness, job: JobRecord, status: dg.DagsterRunStatus, **tags: str) -> dg.DagsterRun:
    run = dg.DagsterRun(
        job_name="__ASSET_JOB",
        status=status,
        asset_selection=frozenset({dg.AssetKey(["jobs", "command"])}),
        tags={"dagster/partition": job.id, **tags},
    )
    harness.instance.add_run(run)
    return run


def test_run_of_a_cancelled_command_job_is_cancelled(harness: SensorHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submit(harness)
    run = dagster_run(harness, job, dg.DagsterRunStatus.STARTED)
    harness.plane.jobs.cancel(job.id)
    cancelled: list[str] = []
    monkeypatch.setattr(harness.instance.run_coordinator, "cancel_run", cancelled.append)
    harness.tick(stop_cancelled_jobs)
    assert cancelled == [run.run_id]


def test_command_job_whose_worker_died_is_retried_in_a_new_run(harness: SensorHarness) -> None:
    job = submit(harness)
    run = dagster_run(harness, job, dg.DagsterRunStatus.FAILURE)
    assert can_retry_dead_worker(run)
    request = make_retry_request(run)
    assert (request.partition_key, keys(request)) == (job.id, ["jobs/command"])


def test_command_job_fails_when_its_run_failed_permanently(harness: SensorHarness) -> None:
    job = submit(harness)
    harness.plane.jobs.start(job.id)
    run = dagster_run(harness, job, dg.DagsterRunStatus.FAILURE, **{FAILURE_REASON_TAG: "STEP_FAILURE"})
    assert not is_retried(harness.instance, run, harness.plane)
    found = harness.plane.jobs.read(job.id)
    assert found.status == "failed" and run.run_id in found.reason


def test_command_job_relaunched_manually_fails_when_its_run_fails_again(harness: SensorHarness) -> None:
    """Its run has the first run's tags, including the decision about it.

    The job stayed running, and another sensor started it again.
    """
    job = submit(harness)
    first = dagster_run(harness, job, dg.DagsterRunStatus.FAILURE, **{FAILURE_REASON_TAG: "STEP_FAILURE"})
    assert not is_retried(harness.instance, first, harness.plane)
    tags = harness.instance.get_run_by_id(first.run_id).tags
    harness.plane.jobs.start(job.id)
    again = dagster_run(
        harness, job, dg.DagsterRunStatus.FAILURE, **{FAILURE_REASON_TAG: "STEP_FAILURE", RETRY_TAG: tags[RETRY_TAG]}
    )
    assert not is_retried(harness.instance, again, harness.plane)
    found = harness.plane.jobs.read(job.id)
    assert found.status == "failed" and again.run_id in found.reason
