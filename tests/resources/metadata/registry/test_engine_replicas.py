"""Engine replicas: wanted versions follow from the deployments; only recent reports count."""

from typing import Any

import pytest
from sqlalchemy import update

from resources.metadata.database import Database
from resources.metadata.registry import deployments, engine_replicas
from resources.metadata.registry.deployments import Deployment
from resources.metadata.tables import engine_replicas as table
from tests.support.resources.deployments import begin, end
from tests.support.resources.model_versions import model


def record(database: Database, deployment: Deployment) -> int:
    with database.write() as connection:
        return engine_replicas.record_file(
            connection, deployment, uri=f"s3://hanzo-models/{deployment.id}", size_bytes=5, smoke_prompts=("Who?",)
        )


def begin_with_file(database: Database, version: int, promotion: int, name: str = "m") -> Deployment:
    row = begin(database, version, promotion, name)
    record(database, row)
    return row


def listed(database: Database) -> list[tuple[str, int, str]]:
    with database.read() as connection:
        return [(each.name, each.version, each.status) for each in engine_replicas.list_wanted(connection)]


def report(database: Database, replica: str, *models: dict[str, Any]) -> None:
    with database.write() as connection:
        engine_replicas.record_report(connection, replica, {"ready": True, "deployments": list(models)})


def live(database: Database) -> list[str]:
    with database.read() as connection:
        return [replica.id for replica in engine_replicas.list_live_replicas(connection)]


def test_successor_and_serving_version_are_both_wanted_until_the_successor_serves(database: Database) -> None:
    end(database, begin_with_file(database, 1, 10))
    second = begin_with_file(database, 2, 11)
    begin_with_file(database, 1, 12, "other")
    assert listed(database) == [("m", 1, "serving"), ("m", 2, "deploying"), ("other", 1, "deploying")]
    end(database, second)
    assert listed(database) == [("m", 2, "serving"), ("other", 1, "deploying")]


def test_failed_and_withdrawn_deployments_are_not_wanted(database: Database) -> None:
    end(database, begin_with_file(database, 1, 10))
    end(database, begin_with_file(database, 2, 11), "no answer")
    assert listed(database) == [("m", 1, "serving")]
    with database.write() as connection:
        deployments.withdraw_model(connection, model())
    assert listed(database) == []


def test_deployment_of_a_dead_worker_is_not_wanted_once_a_later_one_serves(database: Database) -> None:
    first = begin_with_file(database, 1, 10)
    second = begin_with_file(database, 2, 11)
    assert listed(database) == [("m", 2, "deploying")], "the newest of two that are being deployed"
    end(database, second)
    assert first.id < second.id and listed(database) == [("m", 2, "serving")]


def test_deployment_that_was_pushed_is_not_wanted_before_it_has_a_file(database: Database) -> None:
    row = begin(database, 1, 10)
    end(database, row)
    assert listed(database) == []
    assert (record(database, row), record(database, row)) == (1, 2), "each call is an attempt"
    with database.read() as connection:
        (found,) = engine_replicas.list_wanted(connection)
        assert engine_replicas.find_wanted_file(connection, row.sha256) == found
        assert engine_replicas.find_wanted_file(connection, "f" * 64) is None
    assert (found.attempt, found.smoke_prompts, found.size_bytes) == (2, ("Who?",), 5)


def test_reports_count_while_they_are_recent(database: Database) -> None:
    for replica in ("b", "a", "a"):
        report(database, replica)
    assert live(database) == ["a", "b"]
    old = table.c.reported_at - (engine_replicas.LIVE_SECONDS + 1) * 1000
    with database.write() as connection:
        connection.execute(update(table).where(table.c.id == "a").values(reported_at=old))
    assert live(database) == ["b"]
    with database.write() as connection:
        engine_replicas.delete_replica(connection, "b")
    assert live(database) == []


@pytest.mark.parametrize(("age", "count"), [(engine_replicas.FORGET_SECONDS + 5, 1), (60, 2)])
def test_reports_of_long_absent_replicas_are_deleted(database: Database, age: int, count: int) -> None:
    report(database, "gone")
    with database.write() as connection:
        connection.execute(update(table).values(reported_at=table.c.reported_at - age * 1000))
    report(database, "new")
    with database.read() as connection:
        assert len(connection.execute(table.select()).all()) == count
