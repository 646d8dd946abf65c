"""A version that a check blocks: it is not split, jobs on it fail and say why, and it is looked at again on request."""

from dataclasses import replace

from sqlalchemy import delete

from recipes.schema import Artifact
from recipes.validation.findings import ValidationFacts, Violations
from resources.metadata.datasets import DatasetVersion
from resources.metadata.outbox import emit
from resources.metadata.tables import dataset_versions
from resources.metadata.validations import CHECK_REQUESTED
from resources.validation.judge import Verdict
from resources.validation.policy import Check
from sensors.check_versions_again import check_versions_again
from sensors.split_new_versions import split_new_versions
from sensors.start_submitted_jobs import start_submitted_jobs
from tests.sensors.test_decisions import House, house, keys, repository

__all__ = ["house", "repository"]
STATISTICS = Artifact(kind="statistics", uri="s3://hanzo-ml/datasets/d/1/x", digest="d" * 64, size_bytes=9)


def judge(house: House, version: DatasetVersion, passed: bool) -> None:
    reasons = () if passed else ("line 3, answer must be string",)
    verdict = Verdict(check=Check.CONTRACT, passed=passed, severity="error", blocking=True, reasons=reasons)
    with house.plane.database.write() as connection:
        facts = ValidationFacts(violations=Violations())
        house.plane.validations.set_version(connection, version, STATISTICS, facts, [verdict])


def request(house: House, version: DatasetVersion) -> int:
    with house.plane.database.write() as connection:
        return emit(connection, "datasets", CHECK_REQUESTED, version.name, {"dataset_id": version.id})


def test_a_blocked_version_is_not_split_by_a_reset_cursor(house: House) -> None:
    version = house.dataset(split=False)
    judge(house, version, passed=False)
    assert house.tick(split_new_versions) == []


def test_a_job_on_a_blocked_version_fails_with_the_reason_also_where_it_was_split_before(house: House) -> None:
    version = house.dataset()
    judge(house, version, passed=False)
    house.submit("job-1")
    assert house.tick(start_submitted_jobs) == []
    job = house.plane.jobs.read("job-1")
    assert job.status == "failed"
    assert job.reason == (
        "dataset ellarin@1 did not pass its check contract: line 3, answer must be string: "
        "see `hanzo-ml dataset check ellarin@1`"
    )


def test_a_version_that_passes_again_is_trained_on(house: House) -> None:
    version = house.dataset()
    for passed in (False, True):
        judge(house, version, passed)
    house.submit("job-1")
    assert [request.run_key for request in house.tick(start_submitted_jobs)] == ["job-1"]


def test_a_requested_check_is_one_run_of_the_version_and_its_splits(house: House) -> None:
    version = house.dataset()
    seq = request(house, version)
    (asked,) = house.tick(check_versions_again)
    assert asked.run_key == f"check-{seq}"
    assert keys(asked) == [f"datasets/ellarin/{step}" for step in ("version", "train", "validation", "test")]
    assert asked.tags["hanzo_ml/dataset_version"] == "ellarin@1"
    assert house.tick(check_versions_again) == []


def test_a_prepared_version_that_is_checked_again_keeps_its_splits(house: House) -> None:
    raw = house.dataset()
    lineage = {"parent_datasets": [raw.reference], "transform": {"filter": {"dedup": True}}}
    prepared = replace(raw, id="prepared", version=2, content_sha256="p" * 64, lineage=lineage)
    with house.plane.database.write() as connection:
        house.plane.datasets.add(connection, prepared)
    request(house, prepared)
    (asked,) = house.tick(check_versions_again)
    assert keys(asked) == ["datasets/ellarin/version"]
    assert asked.tags["hanzo_ml/dataset_version"] == "ellarin@2"


def test_a_version_that_was_deleted_since_holds_up_nothing(house: House) -> None:
    gone, version = house.dataset("gone"), house.dataset()
    request(house, gone)
    seq = request(house, version)
    with house.plane.database.write() as connection:
        connection.execute(delete(dataset_versions).where(dataset_versions.c.id == gone.id))
    assert [asked.run_key for asked in house.tick(check_versions_again)] == [f"check-{seq}"]
