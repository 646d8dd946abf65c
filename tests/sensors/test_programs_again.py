"""A run that works for a job and finds no store, or no database, is tried again: the job's program goes on, or has ended."""

from datetime import timedelta

import dagster as dg
import pytest
from dagster_postgres.utils import DagsterPostgresException
from sqlalchemy.exc import OperationalError

from recipes.buckets import StoreFull, StoreRefuses, StoreUnavailable
from resources.compute.base import JobFailed, MachineFailed, NoStore, RefusedByStore
from resources.sandbox import SANDBOX
from sensors import retry_dead_runs as retries
from sensors.failed_runs import MAX_AGAIN
from sensors.retries import FAILURE_REASON, RETRIES, RETRY_OF
from sensors.retry_dead_runs import retry_dead_runs
from tests.sensors.test_decisions import MODEL, House, house, keys, repository
from tests.sensors.test_run_sweeps import Search

__all__ = ["house", "repository"]  # fixtures
KEY = dg.AssetKey(["models", MODEL, "checkpoint"])


def train(house: House, error: Exception, id: str = "job-1", model: str = MODEL, **tags: str) -> str:
    """A run of the training of a job that ends with this error; returns its id."""
    key = dg.AssetKey(["models", model, "checkpoint"])

    @dg.asset(key=key, partitions_def=dg.DynamicPartitionsDefinition(name=f"{model}-runs"))
    def checkpoint() -> None:
        raise error

    house.instance.add_dynamic_partitions(f"{model}-runs", [id])
    job = dg.Definitions(assets=[checkpoint]).get_implicit_global_asset_job_def()
    tags = {FAILURE_REASON: "STEP_FAILURE", **tags}
    done = job.execute_in_process(
        instance=house.instance, partition_key=id, asset_selection=[key], raise_on_error=False, tags=tags
    )
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
        (DagsterPostgresException("too many retries for DB connection"), 0, True),
        (StoreUnavailable("no answer"), MAX_AGAIN, False),
        (NoStore("train job-1 failed: no space left for s3://hanzo-ml/checkpoints/job-1/4"), 0, True),
        (NoStore("train job-1 failed: no space left for s3://hanzo-ml/checkpoints/job-1/4"), MAX_AGAIN, False),
        (StoreRefuses("wrong key"), MAX_AGAIN - 1, True),
        (RefusedByStore("train job-1 failed: starting again: the object store refuses: wrong key"), MAX_AGAIN - 1, True),
        (MachineFailed("train job-1 failed after 12 attempts: killed"), 0, False),
        (JobFailed("train job-1 failed after 1 attempt: KeyError: 'x'"), 0, False),
    ],
    ids=[
        "store-away",
        "database-away",
        "history-away",
        "too-often",
        "disk-full",
        "full-too-often",
        "refused",
        "program-refused",
        "program-killed",
        "program",
    ],
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


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (NoStore("train failed: no space left for s3://hanzo-ml/checkpoints/1"), True),
        (StoreUnavailable("no answer"), True),
        (StoreFull("s3://hanzo-ml/results/1"), True),
        (OperationalError("SELECT 1", {}, Exception("the server closed the connection")), False),
        (StoreRefuses("wrong key"), False),
        (RefusedByStore("train failed: starting again: the object store refuses: wrong key"), False),
    ],
    ids=["program-found-no-store", "store-away", "store-full", "database-away", "store-refuses", "store-refused-program"],
)
def test_a_trial_waits_for_its_store_in_its_place_however_long_that_takes(
    house: House, monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool
) -> None:
    """A sweep lost its trials to a store that was away for hours, one after the other: none of them can be resumed."""
    monkeypatch.setattr(retries, "AGAIN_PAUSE", timedelta(0))
    search = Search(house, max_trials=2, max_concurrent_trials=1)
    search.look()
    trial = search.trials[0].job_id
    house.plane.jobs.start(trial)
    train(house, error, trial, SANDBOX, **{RETRIES: str(MAX_AGAIN)})
    assert [request.partition_key for request in house.tick(retry_dead_runs)] == [trial] * again
    assert search.look().jobs[0][1].endswith("which is tried again") == again
    assert search.statuses() == (["running"] if again else ["failed", "running"])
    search.cancel()
    assert house.tick(retry_dead_runs) == []


def test_a_job_s_reason_is_what_its_program_said(training: House) -> None:
    """It began with `resources.compute.base.JobFailed:`, which says nothing to whoever submitted it."""
    run = train(training, JobFailed("train job-1 failed after 1 attempt: KeyError: 'x'"))
    training.tick(retry_dead_runs)
    said = "its run failed: train job-1 failed after 1 attempt: KeyError: 'x'"
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
