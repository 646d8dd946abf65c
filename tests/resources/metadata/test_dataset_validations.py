"""Dataset validations: verdicts accumulate, each change is one event, deletion removes all."""

import pytest
from sqlalchemy import delete

from recipes.contracts.validation_results import Leaks, ValidationFacts, Violations
from recipes.storage.manifest import Artifact
from resources.datasets.check_policy import Check
from resources.datasets.check_verdicts import Verdict
from resources.datasets.validations import CHECKED_EVENT, Validations
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.outbox import read_after
from resources.metadata.tables import dataset_versions

STATISTICS = Artifact(kind="statistics", uri="s3://hanzo-ml/datasets/d/1/validate/x", digest="d" * 64, size_bytes=9)
FACTS = ValidationFacts(violations=Violations())


def version(database: Database) -> DatasetVersion:
    made = DatasetVersion(
        id="v1",
        name="d",
        version=1,
        organization="default",
        created_at=1,
        created_by="u",
        storage_path="s3://x/",
        format="jsonl",
        size_bytes=5,
        num_records=1,
        schema={},
        splits={},
        metadata={},
        tags=[],
        lineage={},
        content_sha256="b" * 64,
        artifact=STATISTICS,
    )
    with database.write() as connection:
        Datasets(database).add(connection, made)
    return made


def verdict(check: Check, passed: bool, blocking: bool = True) -> Verdict:
    reasons = () if passed else ("it is bad",)
    return Verdict(check=check, passed=passed, severity="error", blocking=blocking, reasons=reasons)


def failures(database: Database) -> list[list[str]]:
    with database.read() as connection:
        return [event.payload["failed"] for event in read_after(connection, 0, [CHECKED_EVENT])]


@pytest.mark.requirement("D4")
def test_record_and_split_verdicts_combine_and_each_change_is_one_event(database: Database) -> None:
    made, validations = version(database), Validations(database)
    assert validations.read_blocked(made.id) == ""
    for contract in (False, False, True):
        with database.write() as connection:
            validations.set_version(connection, made, STATISTICS, FACTS, [verdict(Check.CONTRACT, contract)])
        blocked = "" if contract else "dataset d@1 did not pass its check contract: it is bad"
        assert validations.read_blocked(made.id) == blocked
    with database.write() as connection:
        leaks = Leaks(tested=1, searched=1, exact=1, near=0)
        validations.set_leaks(connection, made, leaks, verdict(Check.LEAKAGE, False))
    assert validations.read_blocked(made.id) == "dataset d@1 did not pass its check leakage: it is bad"
    with database.write() as connection:
        validations.set_version(connection, made, STATISTICS, FACTS, [verdict(Check.CONTRACT, True)])
        found = validations.find(made.id, connection)
    assert found is not None and found.leaks == leaks
    assert {each.check: each.passed for each in found.verdicts} == {Check.CONTRACT: True, Check.LEAKAGE: False}
    assert failures(database) == [["contract"], [], ["leakage"]]


def test_failed_check_without_blocking_is_reported_and_does_not_block(database: Database) -> None:
    made, validations = version(database), Validations(database)
    with database.write() as connection:
        validations.set_version(connection, made, STATISTICS, FACTS, [verdict(Check.DRIFT, False, blocking=False)])
    assert validations.read_blocked(made.id) == ""
    assert failures(database) == [["drift"]]


def test_deleting_a_version_deletes_its_validation(database: Database) -> None:
    made, validations = version(database), Validations(database)
    with database.write() as connection:
        validations.set_version(connection, made, STATISTICS, FACTS, [verdict(Check.CONTRACT, True)])
        connection.execute(delete(dataset_versions).where(dataset_versions.c.id == made.id))
        assert validations.find(made.id, connection) is None
