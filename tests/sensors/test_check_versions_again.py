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
from tests.support.sensors.sensor_house import House, house, keys, repository

__all__ = ["house", "repository"]


def request(house: House, version: DatasetVersion) -> int:
    with house.plane.database.write() as connection:
        return emit(connection, "datasets", CHECK_REQUESTED_EVENT, version.name, {"dataset_id": version.id})


def test_a_blocked_version_is_not_split_by_a_reset_cursor(house: House) -> None:
    version = house.dataset(split=False)
    house.judge(version, passed=False)
    assert house.tick(split_new_versions) == []


def test_job_on_a_blocked_version_fails_with_the_reason_even_if_already_split(house: House) -> None:
    version = house.dataset()
    house.judge(version, passed=False)
    house.submit("job-1")
    assert house.tick(start_submitted_jobs) == []
    job = house.plane.jobs.read("job-1")
    assert job.status == "failed"
    assert job.reason == (
        "dataset ellarin@1 did not pass its check contract: line 3, answer must be string: "
        "see `hanzo-ml dataset check ellarin@1`"
    )


def test_job_starts_when_its_version_passes_a_later_check(house: House) -> None:
    version = house.dataset()
    for passed in (False, True):
        house.judge(version, passed=passed)
    house.submit("job-1")
    assert [request.run_key for request in house.tick(start_submitted_jobs)] == ["job-1"]


def test_requested_check_starts_one_run_of_the_version_and_its_splits(house: House) -> None:
    version = house.dataset()
    seq = request(house, version)
    (asked,) = house.tick(check_versions_again)
    assert asked.run_key == f"check-{seq}"
    assert keys(asked) == [f"datasets/ellarin/{step}" for step in ("version", "train", "validation", "test")]
    assert asked.tags["hanzo_ml/dataset_version"] == "ellarin@1"
    assert house.tick(check_versions_again) == []


def test_prepared_version_is_checked_once_and_its_jobs_wait_for_the_check(house: House) -> None:
    raw = house.dataset()
    lineage = {"parent_datasets": [raw.reference], "transform": {"filter": {"dedup": True}}}
    house.tick(split_new_versions)
    prepared = replace(
        house.plane.datasets.read("ellarin", "default"), id="prepared", version=2, content_sha256="p" * 64, lineage=lineage
    )
    with house.plane.database.write() as connection:
        house.plane.datasets.add(connection, prepared)
    house.submit("job-1", dataset="ellarin@2")
    assert house.tick(start_submitted_jobs) == []
    assert house.plane.jobs.read("job-1").reason == "waits for the checks and splits of ellarin@2"
    (asked,) = house.tick(split_new_versions)
    assert keys(asked) == [f"datasets/ellarin/{step}" for step in ("version", "train", "validation", "test")]
    assert asked.tags["hanzo_ml/dataset_version"] == "ellarin@2"
    house.judge(prepared)
    assert [request.run_key for request in house.tick(start_submitted_jobs)] == ["job-1"]
    house.reset()
    assert house.tick(split_new_versions) == []


def test_deleted_version_does_not_block_checks_or_splits_of_others(house: House) -> None:
    gone, version = house.dataset("gone", split=False), house.dataset(split=False)
    request(house, gone)
    seq = request(house, version)
    with house.plane.database.write() as connection:
        connection.execute(delete(dataset_versions).where(dataset_versions.c.id == gone.id))
    assert [asked.run_key for asked in house.tick(check_versions_again)] == [f"check-{seq}"]
    assert [asked.run_key for asked in house.tick(split_new_versions)] == [f"split-{version.id}"]
