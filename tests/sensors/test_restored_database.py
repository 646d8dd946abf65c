"""A restored database with a newer Dagster: sensors continue from the database."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import dagster as dg
import pytest

from sensors.decisions.retry_policy import NO, RETRIED_RUN_TAG, RETRY_TAG
from sensors.evaluate_completed_jobs import evaluate_completed_jobs
from sensors.recover_restored_jobs import go_on_with_put_back_jobs
from sensors.sensor import Sensor
from sensors.split_new_versions import split_new_versions
from tests.support.sensors.interrupted_runs import FAILURE, run_of
from tests.support.sensors.sensor_harness import MODEL, SensorHarness, harness, keys, repository

__all__ = ["harness", "repository"]  # fixtures
SUCCESS = dg.DagsterRunStatus.SUCCESS


@contextmanager
def lost(harness: SensorHarness) -> Iterator[None]:
    """Discard what is recorded within the block."""
    database = harness.plane.database
    file, copy = Path(str(database.engine.url.database)), harness.folder / "backup.db"
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    yield
    database.close()
    for path in file.parent.glob(f"{file.name}*"):
        path.unlink()
    shutil.copy(copy, file)


def test_work_lost_by_the_restore_is_repeated_once(harness: SensorHarness) -> None:
    """One of two completed jobs was registered before the backup, the other after it."""
    for job in ("job-1", "job-2"):
        harness.submit(job)
        harness.complete(job)
    harness.register("job-1")
    version = harness.dataset(split=False)
    sensors = (evaluate_completed_jobs, split_new_versions)
    with lost(harness):
        assert run_keys(harness, *sensors) == ["evaluate-job-2", f"split-{version.id}"]
        harness.register("job-2")
        harness.split(version)
        assert run_keys(harness, *sensors) == []
    harness.submit("job-3")  # a numeric cursor would have skipped it
    harness.complete("job-3")
    known = ["evaluate-job-2-again-1", "evaluate-job-3-again-1", f"split-{version.id}-again-1"]
    assert run_keys(harness, *sensors) == known
    assert run_keys(harness, *sensors) == []


def run_keys(harness: SensorHarness, *sensors: Sensor) -> list[str | None]:
    return [request.run_key for sensor in sensors for request in harness.tick(sensor)]


@pytest.mark.parametrize(("status", "tags"), [(SUCCESS, {}), (FAILURE, {RETRY_TAG: NO})])
def test_running_job_whose_run_has_ended_is_continued_once(
    harness: SensorHarness, status: dg.DagsterRunStatus, tags: dict[str, str]
) -> None:
    harness.submit("job-1")
    harness.plane.jobs.start("job-1")
    run = run_of(harness, "job-1", status, **tags)
    run_of(harness, "job-1", SUCCESS, step="evaluation")
    (request,) = harness.tick(go_on_with_put_back_jobs)
    assert (request.tags[RETRIED_RUN_TAG], request.partition_key) == (run, "job-1")
    assert keys(request) == [f"models/{MODEL}/checkpoint"]
    run_of(harness, "job-1", dg.DagsterRunStatus.STARTED, **{RETRIED_RUN_TAG: run})
    assert harness.tick(go_on_with_put_back_jobs) == []


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.STARTED, FAILURE, dg.DagsterRunStatus.CANCELED])
def test_job_with_an_active_or_unprocessed_run_is_left_alone(harness: SensorHarness, status: dg.DagsterRunStatus) -> None:
    harness.submit("job-1")
    run_of(harness, "job-1", status)
    assert harness.tick(go_on_with_put_back_jobs) == []


def test_manually_relaunched_run_is_not_duplicated(harness: SensorHarness) -> None:
    """Dagster's UI copies the failed run's tags: it looked ended, with its job already marked."""
    harness.submit("job-1")
    harness.plane.jobs.start("job-1")
    first = run_of(harness, "job-1", FAILURE)
    run_of(harness, "job-1", dg.DagsterRunStatus.STARTED, **{RETRY_TAG: f"{NO} {first}"})
    assert harness.tick(go_on_with_put_back_jobs) == []


def test_a_job_that_has_ended_is_left_alone(harness: SensorHarness) -> None:
    harness.submit("job-1")
    harness.complete("job-1")
    run_of(harness, "job-1", SUCCESS)
    assert harness.tick(go_on_with_put_back_jobs) == []
