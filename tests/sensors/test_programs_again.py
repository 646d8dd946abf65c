"""A run that works for a job and finds no store, or no database, is tried again: the job's program goes on, or has ended."""

import time
from datetime import timedelta

import dagster as dg
import pytest
from sqlalchemy.exc import OperationalError

from recipes.buckets import StoreUnavailable
from resources.compute.base import JobFailed, MachineFailed, NoStore
from sensors import retry_dead_runs as retries
from sensors.failed_runs import MAX_AGAIN
from sensors.retries import FAILURE_REASON, RETRIES, RETRY_OF
from sensors.retry_dead_runs import SETTLED, retry_dead_runs
from tests.sensors.test_decisions import MODEL, House, house, keys, repository

__all__ = ["house", "repository"]  # fixtures
KEY = dg.AssetKey(["models", MODEL, "checkpoint"])


def train(house: House, error: Exception, **tags: str) -> str:
    """A run of the training of job-1 that ends with this error; returns its id."""

    @dg.asset(key=KEY, partitions_def=dg.DynamicPartitionsDefinition(name=f"{MODEL}-runs"))
    def checkpoint() -> None:
        raise error

    house.instance.add_dynamic_partitions(f"{MODEL}-runs", ["job-1"])
    job = dg.Definitions(assets=[checkpoint]).get_implicit_global_asset_job_def()
    tags = {FAILURE_REASON: "STEP_FAILURE", **tags}
    done = job.execute_in_process(
        instance=house.instance, partition_key="job-1", asset_selection=[KEY], raise_on_error=False, tags=tags
    )
    time.sleep(SETTLED.total_seconds() + 0.1)
    return str(done.run_id)


@pytest.fixture
def training(house: House, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(retries, "AGAIN_PAUSE", timedelta(0))
    house.submit("job-1")
    house.plane.jobs.start("job-1")
    return house


@pytest.mark.parametrize(
    ("error", "tried", "again"),
    [
        (StoreUnavailable("no answer"), 0, True),
        (OperationalError("SELECT 1", {}, Exception("the server closed the connection")), MAX_AGAIN - 1, True),
        (StoreUnavailable("no answer"), MAX_AGAIN, False),
        (NoStore("train job-1 failed: no space left for s3://hanzo-ml/checkpoints/job-1/4"), 0, True),
        (NoStore("train job-1 failed: no space left for s3://hanzo-ml/checkpoints/job-1/4"), MAX_AGAIN, False),
        (MachineFailed("train job-1 failed after 12 attempts: killed"), 0, False),
        (JobFailed("train job-1 failed after 1 attempts: KeyError: 'x'"), 0, False),
    ],
    ids=["store-away", "database-away", "too-often", "disk-full", "full-too-often", "program-killed", "program"],
)
def test_a_run_goes_on_whose_worker_found_no_store(training: House, error: Exception, tried: int, again: bool) -> None:
    run = train(training, error, **{RETRIES: str(tried)})
    requests = training.tick(retry_dead_runs)
    assert [(keys(request), request.partition_key) for request in requests] == [([KEY.to_user_string()], "job-1")] * again
    assert [(request.tags[RETRY_OF], request.tags[RETRIES]) for request in requests] == [(run, str(tried + 1))] * again
    job = training.plane.jobs.read("job-1")
    assert job.status == ("running" if again else "failed")
    assert str(error).splitlines()[0] in job.reason and run in job.reason
    assert job.reason.endswith("which is tried again") == again


def test_a_job_s_reason_is_what_its_program_said(training: House) -> None:
    """It began with `resources.compute.base.JobFailed:`, which says nothing to whoever submitted it."""
    run = train(training, JobFailed("train job-1 failed after 1 attempts: KeyError: 'x'"))
    training.tick(retry_dead_runs)
    said = "its run failed: train job-1 failed after 1 attempts: KeyError: 'x'"
    assert training.plane.jobs.read("job-1").reason == f"{said} (run {run} in Dagster)"


def test_it_waits_before_it_goes_on(training: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "AGAIN_PAUSE", timedelta(hours=1))
    train(training, StoreUnavailable("no answer"))
    assert training.tick(retry_dead_runs) == []
    assert training.plane.jobs.read("job-1").status == "running"


def test_it_does_not_go_on_with_a_job_that_was_cancelled_meanwhile(training: House) -> None:
    train(training, StoreUnavailable("no answer"))
    training.plane.jobs.cancel("job-1")
    assert training.tick(retry_dead_runs) == []
