"""Splits, validations and preparations are retried after outages, but not for bad data."""

from datetime import timedelta
from typing import Any

import dagster as dg
import pytest
from sqlalchemy.exc import OperationalError

from hanzo_ml_assets.datasets import SPLITS
from hanzo_ml_assets.definitions import definitions
from hanzo_ml_assets.failure_reason import reports_exit_reason
from hanzo_ml_assets.preparation import PREPARATION_TAG
from hanzo_ml_assets.run_tags import version_tags
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import BadConfiguration
from recipes.storage.buckets import StoreUnavailable
from recipes.storage.manifest import canonical_json
from resources.compute.base import JobFailed
from resources.ingest.version_creation import create_version
from resources.metadata.datasets import DatasetVersion
from resources.metadata.jobs import PREPARATION
from sensors import retry_dead_runs as sensor
from sensors.decisions import retry_policy
from sensors.decisions.retry_policy import FAILURE_REASON_TAG, MAX_ERROR_RETRIES, RETRIED_RUN_TAG, RETRIES_TAG
from sensors.retry_dead_runs import retry_dead_runs
from sensors.split_new_versions import split_new_versions
from sensors.start_submitted_jobs import start_submitted_jobs
from tests.recipes.preparation.preparation_workspace import questions
from tests.support.sensors.sensor_harness import DATASET, MODEL, SensorHarness, harness, keys, repository

__all__ = ["harness", "repository"]  # fixtures
DATABASE_AWAY = OperationalError("SELECT 1", {}, Exception("the server closed the connection"))
STEPS = [f"datasets/{DATASET}/{step}" for step in ("version", *SPLITS)]
PREPARED = f"datasets/{DATASET}/prepared"
CASES = pytest.mark.parametrize(
    ("error", "tried", "again"),
    [
        (StoreUnavailable("no answer"), 0, True),
        (DATABASE_AWAY, MAX_ERROR_RETRIES - 1, True),
        (JobFailed("it failed after 12 attempts", ExitReason.RESTART_REQUESTED), 0, True),
        (StoreUnavailable("no answer"), MAX_ERROR_RETRIES, False),
        (JobFailed("it failed after 1 attempt: KeyError: 'x'"), 0, False),
        (BadConfiguration("line 3 is no JSON"), 0, False),
    ],
    ids=["store-away", "database-away", "machine", "too-often", "program", "users"],
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensor, "ERROR_RETRY_PAUSE", timedelta(0))


def fail(harness: SensorHarness, keys: list[str], error: Exception, partition: str | None = None, **tags: str) -> str:
    """Record a run whose first asset fails with this error; return its id."""

    def failing(key: str) -> dg.AssetsDefinition:
        @dg.asset(key=key.split("/"), partitions_def=partitions)
        @reports_exit_reason
        def step() -> None:
            raise error

        return step

    partitions = dg.DynamicPartitionsDefinition(name=f"{MODEL}-runs") if partition else None
    if partition:
        harness.instance.add_dynamic_partitions(f"{MODEL}-runs", [partition])
    job = dg.Definitions(assets=[failing(key) for key in keys]).get_implicit_global_asset_job_def()
    tags = {FAILURE_REASON_TAG: "STEP_FAILURE", **tags}
    done = job.execute_in_process(
        instance=harness.instance,
        partition_key=partition,
        raise_on_error=False,
        tags=tags,
        asset_selection=[dg.AssetKey(key.split("/")) for key in keys],
    )
    return str(done.run_id)


def split(harness: SensorHarness, version: DatasetVersion, error: Exception, **tags: str) -> str:
    return fail(harness, STEPS, error, **version_tags(version), **tags)


@CASES
def test_split_failed_by_storage_outage_is_retried_up_to_the_limit(
    harness: SensorHarness, error: Exception, tried: int, again: bool
) -> None:
    version = harness.dataset(split=False)
    run = split(harness, version, error, **{RETRIES_TAG: str(tried)})
    requests = harness.tick(retry_dead_runs)
    assert [sorted(keys(request)) for request in requests] == [sorted(STEPS)] * again
    assert [(request.tags[RETRIED_RUN_TAG], request.tags[RETRIES_TAG]) for request in requests] == [
        (run, str(tried + 1))
    ] * again
    assert all(request.tags.items() >= version_tags(version).items() for request in requests)


@CASES
def test_preparation_failed_by_storage_outage_is_retried_up_to_the_limit(
    harness: SensorHarness, error: Exception, tried: int, again: bool
) -> None:
    asked = harness.plane.jobs.submit(name="p", config={}, user="u", organization="default", type=PREPARATION)
    harness.plane.jobs.start(asked.id)
    run = fail(harness, [PREPARED], error, **{PREPARATION_TAG: asked.id, RETRIES_TAG: str(tried)})
    requests = harness.tick(retry_dead_runs)
    assert [(request.tags[RETRIED_RUN_TAG], request.tags[PREPARATION_TAG]) for request in requests] == [
        (run, asked.id)
    ] * again
    job = harness.plane.jobs.read(asked.id)
    assert job.status == ("running" if again else "failed")
    assert (run in job.reason) != again


def test_cancelled_preparation_is_not_retried(harness: SensorHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = harness.plane.jobs.submit(name="p", config={}, user="u", organization="default", type=PREPARATION)
    fail(harness, [PREPARED], StoreUnavailable("no answer"), **{PREPARATION_TAG: asked.id})
    with monkeypatch.context() as patched:
        patched.setattr(sensor, "ERROR_RETRY_PAUSE", timedelta(hours=1))
        assert harness.tick(retry_dead_runs) == []
    harness.plane.jobs.cancel(asked.id)
    assert harness.tick(retry_dead_runs) == []


@pytest.mark.parametrize("pause", ["ERROR_RETRY_PAUSE", "SETTLING_TIME"])
def test_a_split_waits_before_it_is_tried_again(harness: SensorHarness, monkeypatch: pytest.MonkeyPatch, pause: str) -> None:
    monkeypatch.setattr(sensor, pause, timedelta(hours=1))
    split(harness, harness.dataset(split=False), StoreUnavailable("no answer"))
    assert harness.tick(retry_dead_runs) == []


def test_only_the_newest_failed_split_of_a_version_is_retried(harness: SensorHarness) -> None:
    version = harness.dataset(split=False)
    split(harness, version, StoreUnavailable("no answer"))
    newer = split(harness, version, StoreUnavailable("no answer"))
    assert [request.tags[RETRIED_RUN_TAG] for request in harness.tick(retry_dead_runs)] == [newer]


def test_a_job_waits_while_its_data_is_tried_again_and_fails_with_it(harness: SensorHarness) -> None:
    """One second without the store made it fail."""
    version = harness.dataset(split=False)
    harness.submit("job-1")
    split(harness, version, StoreUnavailable("no answer"))
    for _ in range(2):
        assert harness.tick(start_submitted_jobs) == []
        assert harness.plane.jobs.read("job-1").status == "queued"
        assert harness.tick(retry_dead_runs), "nobody takes it up in this test"
    last = split(harness, version, StoreUnavailable("no answer"), **{RETRIES_TAG: str(MAX_ERROR_RETRIES)})
    assert harness.tick(retry_dead_runs) == []
    assert harness.tick(start_submitted_jobs) == []
    job = harness.plane.jobs.read("job-1")
    assert (job.status, last in job.reason) == ("failed", True)


def test_job_fails_when_its_split_failed_before_the_retry_window(
    harness: SensorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = harness.dataset(split=False)
    run = split(harness, version, StoreUnavailable("no answer"))
    for place in (sensor, retry_policy):
        monkeypatch.setattr(place, "LOOK_BACK", timedelta(0))
    harness.submit("job-1")
    assert harness.tick(retry_dead_runs) == []
    assert harness.tick(start_submitted_jobs) == []
    assert run in harness.plane.jobs.read("job-1").reason


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("step", ["version", "prepared", "evaluation", "checkpoint"])
def test_a_failed_run_s_log_is_read_once(
    harness: SensorHarness, monkeypatch: pytest.MonkeyPatch, step: str, again: bool
) -> None:
    """A run that waited for its retry was read twice per tick, every few seconds."""
    monkeypatch.setattr(sensor, "ERROR_RETRY_PAUSE", timedelta(hours=1))
    error = StoreUnavailable("no answer") if again else ValueError("the user's")
    if step == "version":
        split(harness, harness.dataset(split=False), error)
    elif step == "prepared":
        asked = harness.plane.jobs.submit(name="p", config={}, user="u", organization="default", type=PREPARATION)
        fail(harness, [PREPARED], error, **{PREPARATION_TAG: asked.id})
    else:
        harness.submit("job-1")
        harness.plane.jobs.start("job-1") if step == "checkpoint" else harness.complete("job-1")
        fail(harness, [f"models/{MODEL}/{step}"], error, partition="job-1")
    read: list[str] = []
    all_logs = harness.instance.all_logs

    def reading(run_id: str, **named: Any) -> Any:
        read.append(run_id)
        return all_logs(run_id, **named)

    monkeypatch.setattr(harness.instance, "all_logs", reading)
    for _ in range(3):
        assert harness.tick(retry_dead_runs) == []
    assert len(read) == 1


def test_real_split_succeeds_on_retry_after_a_storage_outage(harness: SensorHarness) -> None:
    raw, plane = harness.folder / "mine.jsonl", harness.plane
    raw.write_bytes(b"".join(canonical_json(row) + b"\n" for row in questions(40)))
    create_version(plane.database, plane.store, name="mine", path=raw, user="u", organization="default")
    (request,) = harness.tick(split_new_versions)
    job = definitions().resolve_implicit_global_asset_job_def()
    bucket = plane.settings.home / "objects"
    bucket.rename(away := bucket.with_name("away"))

    def run(request: dg.RunRequest) -> dg.ExecuteInProcessResult:
        return job.execute_in_process(
            instance=harness.instance,
            asset_selection=list(request.asset_selection or ()),
            tags={**request.tags, FAILURE_REASON_TAG: "STEP_FAILURE"},
            raise_on_error=False,
        )

    assert not run(request).success
    (again,) = harness.tick(retry_dead_runs)
    away.rename(bucket)
    assert run(again).success
    assert plane.datasets.read("mine@1", "default").splits
    assert harness.tick(retry_dead_runs) == []
