"""A command job is started once in the partition of its id; nothing that looks at training takes it for one."""

import dagster as dg
import pytest

from hanzo_ml_assets.command import PARTITIONS
from recipes.command_job import CommandJob
from resources.command_jobs import submit_command
from resources.metadata.jobs import JobRecord
from sensors.evaluate_completed_jobs import evaluate_completed_jobs
from sensors.retry_dead_runs import FAILURE_REASON, fail_job, may_be_retried, retry
from sensors.start_submitted_jobs import start_submitted_jobs
from sensors.start_submitted_preparations import start_submitted_preparations
from sensors.stop_cancelled_jobs import stop_cancelled_jobs
from sensors.watch_training import watch_training
from tests.sensors.test_decisions import House, house, keys, repository

__all__ = ["house", "repository"]  # fixtures


def submit(house: House) -> JobRecord:
    asked = CommandJob.model_validate({"name": "mine", "command": ["python", "train.py"]})
    return submit_command(house.plane.database, house.plane.store, asked, "ann", "default")


def test_it_starts_once_in_the_partition_of_its_id(house: House) -> None:
    job = submit(house)
    (request,) = house.tick(start_submitted_jobs)
    assert (request.run_key, request.partition_key, keys(request)) == (job.id, job.id, ["jobs/command"])
    assert house.instance.has_dynamic_partition(PARTITIONS, job.id)
    assert house.tick(start_submitted_preparations) == []
    house.plane.jobs.start(job.id)
    assert house.tick(start_submitted_jobs) == []


@pytest.mark.parametrize("ended", ["cancelled", "failed", "completed"])
def test_one_that_has_ended_is_not_started(house: House, ended: str) -> None:
    job = submit(house)
    if ended == "cancelled":
        house.plane.jobs.cancel(job.id)
    elif ended == "failed":
        house.plane.jobs.fail(job.id, "reason")
    else:
        house.complete(job.id)
    assert house.tick(start_submitted_jobs) == []


def test_training_beside_it_starts_as_before(house: House) -> None:
    house.dataset()
    job = submit(house)
    house.submit("trains")
    assert {request.run_key for request in house.tick(start_submitted_jobs)} == {job.id, "trains"}


def test_one_that_completed_is_not_evaluated_and_one_that_runs_is_not_watched(house: House) -> None:
    job = submit(house)
    house.plane.jobs.start(job.id)
    assert house.tick(watch_training) == []
    house.complete(job.id)
    assert house.tick(evaluate_completed_jobs) == []
    assert house.plane.jobs.read(job.id).reason == ""


def dagster_run(house: House, job: JobRecord, status: dg.DagsterRunStatus, **tags: str) -> dg.DagsterRun:
    run = dg.DagsterRun(
        job_name="__ASSET_JOB",
        status=status,
        asset_selection=frozenset({dg.AssetKey(["jobs", "command"])}),
        tags={"dagster/partition": job.id, **tags},
    )
    house.instance.add_run(run)
    return run


def test_the_run_of_a_cancelled_one_is_ended(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submit(house)
    run = dagster_run(house, job, dg.DagsterRunStatus.STARTED)
    house.plane.jobs.cancel(job.id)
    cancelled: list[str] = []
    monkeypatch.setattr(house.instance.run_coordinator, "cancel_run", cancelled.append)
    house.tick(stop_cancelled_jobs)
    assert cancelled == [run.run_id]


def test_one_whose_worker_died_goes_on_in_a_new_run(house: House) -> None:
    job = submit(house)
    run = dagster_run(house, job, dg.DagsterRunStatus.FAILURE)
    assert may_be_retried(run)
    request = retry(run)
    assert (request.partition_key, keys(request)) == (job.id, ["jobs/command"])


def test_one_whose_run_failed_for_good_has_failed(house: House) -> None:
    job = submit(house)
    house.plane.jobs.start(job.id)
    run = dagster_run(house, job, dg.DagsterRunStatus.FAILURE, **{FAILURE_REASON: "STEP_FAILURE"})
    fail_job(house.instance, run, house.plane)
    found = house.plane.jobs.read(job.id)
    assert found.status == "failed" and run.run_id in found.reason
