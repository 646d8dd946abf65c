"""A version blocked by a check is not split, and its jobs fail.

The jobs give the reason. The version is checked again on request.
"""

from dataclasses import replace

from sqlalchemy import delete

from resources.datasets.validations import CHECK_REQUESTED_EVENT
from resources.metadata.datasets import DatasetVersion
from resources.metadata.outbox import emit
from resources.metadata.tables import dataset_versions
from sensors.check_versions_again import check_versions_again
from sensors.split_new_versions import split_new_versions
from sensors.start_submitted_jobs import start_submitted_jobs
from tests.support.sensors.sensor_harness import SensorHarness, harness, keys, repository

__all__ = ["harness", "repository"]


def request(harness: SensorHarness, version: DatasetVersion) -> int:
    with harness.plane.database.write() as connection:
        return emit(connection, "datasets", CHECK_REQUESTED_EVENT, version.name, {"dataset_id": version.id})


def test_a_blocked_version_is_not_split_by_a_reset_cursor(harness: SensorHarness) -> None:
    version = harness.dataset(split=False)
    harness.judge(version, passed=False)
    assert harness.tick(split_new_versions) == []


def test_job_on_a_blocked_version_fails_with_the_reason_even_if_already_split(harness: SensorHarness) -> None:
    version = harness.dataset()
    harness.judge(version, passed=False)
    harness.submit("job-1")
    assert harness.tick(start_submitted_jobs) == []
    job = harness.plane.jobs.read("job-1")
    assert job.status == "failed"
    assert job.reason == (
        "dataset ellarin@1 did not pass its check contract: line 3, answer must be string: "
        "see `hanzo-ml dataset check ellarin@1`"
    )


def test_job_starts_when_its_version_passes_a_later_check(harness: SensorHarness) -> None:
    version = harness.dataset()
    for passed in (False, True):
        harness.judge(version, passed=passed)
    harness.submit("job-1")
    assert [request.run_key for request in harness.tick(start_submitted_jobs)] == ["job-1"]


def test_requested_check_starts_one_run_of_the_version_and_its_splits(harness: SensorHarness) -> None:
    version = harness.dataset()
    seq = request(harness, version)
    (asked,) = harness.tick(check_versions_again)
    assert asked.run_key == f"check-{seq}"
    assert keys(asked) == [f"datasets/ellarin/{step}" for step in ("version", "train", "validation", "test")]
    assert asked.tags["hanzo_ml/dataset_version"] == "ellarin@1"
    assert harness.tick(check_versions_again) == []


def test_prepared_version_is_checked_once_and_its_jobs_wait_for_the_check(harness: SensorHarness) -> None:
    raw = harness.dataset()
    lineage = {"parent_datasets": [raw.reference], "transform": {"filter": {"dedup": True}}}
    harness.tick(split_new_versions)
    prepared = replace(
        harness.plane.datasets.read("ellarin", "default"), id="prepared", version=2, content_sha256="p" * 64, lineage=lineage
    )
    with harness.plane.database.write() as connection:
        harness.plane.datasets.add(connection, prepared)
    harness.submit("job-1", dataset="ellarin@2")
    assert harness.tick(start_submitted_jobs) == []
    assert harness.plane.jobs.read("job-1").reason == "waits for the checks and splits of ellarin@2"
    (asked,) = harness.tick(split_new_versions)
    assert keys(asked) == [f"datasets/ellarin/{step}" for step in ("version", "train", "validation", "test")]
    assert asked.tags["hanzo_ml/dataset_version"] == "ellarin@2"
    harness.judge(prepared)
    assert [request.run_key for request in harness.tick(start_submitted_jobs)] == ["job-1"]
    harness.reset()
    assert harness.tick(split_new_versions) == []


def test_deleted_version_does_not_block_checks_or_splits_of_others(harness: SensorHarness) -> None:
    gone, version = harness.dataset("gone", split=False), harness.dataset(split=False)
    request(harness, gone)
    seq = request(harness, version)
    with harness.plane.database.write() as connection:
        connection.execute(delete(dataset_versions).where(dataset_versions.c.id == gone.id))
    assert [asked.run_key for asked in harness.tick(check_versions_again)] == [f"check-{seq}"]
    assert [asked.run_key for asked in harness.tick(split_new_versions)] == [f"split-{version.id}"]
