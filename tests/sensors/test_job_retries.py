"""Runs of a job are retried when store or database is unavailable.

The job's program continues, or has ended.
"""

from datetime import timedelta

import dagster as dg
import pytest
from dagster_postgres.utils import DagsterPostgresException
from sqlalchemy.exc import OperationalError

from hanzo_ml_assets.failure_reason import reports_exit_reason
from recipes.contracts.exit_reason import ExitReason
from recipes.storage.buckets import StoreFull, StoreRefuses, StoreUnavailable
from resources.compute.base import JobFailed
from resources.jobs.sandbox import SANDBOX
from sensors import retry_dead_runs as retries
from sensors.decisions.retry_policy import FAILURE_REASON_TAG, MAX_ERROR_RETRIES, RETRIED_RUN_TAG, RETRIES_TAG
from sensors.retry_dead_runs import retry_dead_runs
from tests.support.sensors.sensor_harness import MODEL, SensorHarness, harness, keys, repository
from tests.support.sensors.sweep_search import Search

__all__ = ["harness", "repository"]  # fixtures
KEY = dg.AssetKey(["models", MODEL, "checkpoint"])


def train(
    harness: SensorHarness, error: Exception, id: str = "job-1", model: str = MODEL, *, reports: bool = True, **tags: str
) -> str:
    """Record a training run of a job that ends with this error; return its id."""
    key = dg.AssetKey(["models", model, "checkpoint"])

    def fail() -> None:
        raise error

    partitions = dg.DynamicPartitionsDefinition(name=f"{model}-runs")
    checkpoint = dg.asset(key=key, partitions_def=partitions)(reports_exit_reason(fail) if reports else fail)
    harness.instance.add_dynamic_partitions(f"{model}-runs", [id])
    job = dg.Definitions(assets=[checkpoint]).get_implicit_global_asset_job_def()
    tags = {FAILURE_REASON_TAG: "STEP_FAILURE", **tags}
    done = job.execute_in_process(
        instance=harness.instance, partition_key=id, asset_selection=[key], raise_on_error=False, tags=tags
    )
    return str(done.run_id)


@pytest.fixture
def training(harness: SensorHarness, monkeypatch: pytest.MonkeyPatch) -> SensorHarness:
    monkeypatch.setattr(retries, "ERROR_RETRY_PAUSE", timedelta(0))
    harness.submit("job-1")
    harness.plane.jobs.start("job-1")
    return harness


@pytest.mark.requirement("A8")
@pytest.mark.parametrize(
    ("error", "tried", "again"),
    [
        (StoreUnavailable("no answer"), 0, True),
        (OperationalError("SELECT 1", {}, Exception("the server closed the connection")), MAX_ERROR_RETRIES - 1, True),
        (DagsterPostgresException("too many retries for DB connection"), 0, True),
        (StoreUnavailable("no answer"), MAX_ERROR_RETRIES, False),
        (JobFailed("train job-1 failed", ExitReason.STORAGE_FULL), 0, True),
        (JobFailed("train job-1 failed", ExitReason.STORAGE_FULL), MAX_ERROR_RETRIES, False),
        (StoreRefuses("wrong key"), MAX_ERROR_RETRIES - 1, True),
        (
            JobFailed("train job-1 failed", ExitReason.STORAGE_DENIED),
            MAX_ERROR_RETRIES - 1,
            True,
        ),
        (JobFailed("train job-1 failed after 12 attempts: killed", ExitReason.KILLED), 0, False),
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
def test_run_failed_by_storage_outage_is_retried_up_to_the_limit(
    training: SensorHarness, error: Exception, tried: int, again: bool
) -> None:
    run = train(training, error, **{RETRIES_TAG: str(tried)})
    requests = training.tick(retry_dead_runs)
    assert [(keys(request), request.partition_key) for request in requests] == [([KEY.to_user_string()], "job-1")] * again
    assert [(request.tags[RETRIED_RUN_TAG], request.tags[RETRIES_TAG]) for request in requests] == [
        (run, str(tried + 1))
    ] * again
    job = training.plane.jobs.read("job-1")
    assert job.status == ("running" if again else "failed")
    assert str(error).splitlines()[0] in job.reason and run in job.reason
    assert job.reason.endswith("which is tried again") == again


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (JobFailed("train failed", ExitReason.STORAGE_FULL), True),
        (StoreUnavailable("no answer"), True),
        (StoreFull("s3://hanzo-ml/results/1"), True),
        (OperationalError("SELECT 1", {}, Exception("the server closed the connection")), False),
        (StoreRefuses("wrong key"), False),
        (JobFailed("train failed", ExitReason.STORAGE_DENIED), False),
    ],
    ids=["program-found-no-store", "store-away", "store-full", "database-away", "store-refuses", "store-refused-program"],
)
def test_sweep_trial_is_retried_without_limit_during_a_storage_outage(
    harness: SensorHarness, monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool
) -> None:
    """A sweep lost its trials to an outage of hours: they cannot be resumed."""
    monkeypatch.setattr(retries, "ERROR_RETRY_PAUSE", timedelta(0))
    search = Search(harness, max_trials=2, max_concurrent_trials=1)
    search.look()
    trial = search.trials[0].job_id
    harness.plane.jobs.start(trial)
    train(harness, error, trial, SANDBOX, **{RETRIES_TAG: str(MAX_ERROR_RETRIES)})
    assert [request.partition_key for request in harness.tick(retry_dead_runs)] == [trial] * again
    assert search.look().jobs[0][1].endswith("which is tried again") == again
    assert search.statuses() == (["running"] if again else ["failed", "running"])
    search.cancel()
    assert harness.tick(retry_dead_runs) == []


def test_job_failure_reason_is_the_programs_message(training: SensorHarness) -> None:
    """It began with the class name `resources.compute.base.JobFailed:`, which means nothing to users."""
    run = train(training, JobFailed("train job-1 failed after 1 attempt: KeyError: 'x'"))
    training.tick(retry_dead_runs)
    said = "its run failed: train job-1 failed after 1 attempt: KeyError: 'x'"
    assert training.plane.jobs.read("job-1").reason == f"{said} (run {run} in Dagster)"


def test_retry_waits_for_its_pause(training: SensorHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "ERROR_RETRY_PAUSE", timedelta(hours=1))
    train(training, StoreUnavailable("no answer"))
    assert training.tick(retry_dead_runs) == []
    assert training.plane.jobs.read("job-1").status == "running"


def test_cancelled_job_is_not_retried(training: SensorHarness) -> None:
    train(training, StoreUnavailable("no answer"))
    training.plane.jobs.cancel("job-1")
    assert training.tick(retry_dead_runs) == []


OLD_CLASSES = [
    ("NoStore", True),
    ("RefusedByStore", True),
    ("StoreUnavailable", True),
    ("OperationalError", True),
    ("MachineFailed", False),
    ("JobFailed", False),
]


@pytest.mark.parametrize(("name", "again"), OLD_CLASSES)
def test_failure_of_an_older_release_is_classified_by_its_class(training: SensorHarness, name: str, again: bool) -> None:
    """Such a run failed before the upgrade: its log has no exit reason."""
    train(training, type(name, (Exception,), {})("as it was"), reports=False)
    assert len(training.tick(retry_dead_runs)) == again


@pytest.mark.parametrize("reason", ExitReason)
def test_only_the_reason_decides_whether_a_training_is_retried(training: SensorHarness, reason: ExitReason) -> None:
    """Neither the message nor the name of the exception's class matters."""

    class RenamedFailure(JobFailed):
        pass

    train(training, RenamedFailure("StoreUnavailable: no space left, killed, out of memory", reason))
    assert len(training.tick(retry_dead_runs)) == reason.is_outside_program
