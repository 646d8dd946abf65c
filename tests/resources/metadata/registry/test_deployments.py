"""Deployments: one per promotion, one serving per model, and failures restore the served version."""

import threading
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from hanzo_ml_assets.deployment import build_deployment, mark_superseded
from resources.errors import EngineUnavailable, ErrorCode
from resources.metadata.database import Database
from resources.metadata.outbox import read_after
from resources.metadata.registry import deployments
from resources.metadata.registry.model_version_edits import ModelVersionEdits
from resources.metadata.registry.registered_models import RegisteredModels
from resources.metadata.registry.undeployment import undeploy
from resources.serving.client import EngineClient
from tests.support.resources.deployments import MODEL, Deploying, begin, end, serving, state
from tests.support.resources.model_versions import model, refused


def types(database: Database) -> list[str]:
    with database.read() as connection:
        return [event.type for event in read_after(connection, 0)]


def test_version_is_not_served_before_its_deployment_succeeds(database: Database) -> None:
    assert serving(database) is None
    deployment = begin(database, 1, 10)
    assert deployment.status == "deploying" and serving(database) is None
    end(database, deployment)
    assert serving(database) == 1


def test_a_promotion_is_deployed_once_however_often_it_is_seen(database: Database) -> None:
    assert begin(database, 1, 10) == begin(database, 1, 10)
    assert types(database) == ["deployment.started"]


def test_deployment_replaces_only_the_previous_one_of_its_name(database: Database) -> None:
    for name in ("m", "other"):
        end(database, begin(database, 1, 10 if name == "m" else 11, name))
    end(database, begin(database, 2, 12))
    assert (serving(database), serving(database, "other")) == (2, 1)
    assert state(database, 10) == ("replaced", "")


def test_failed_deployment_records_its_reason_and_keeps_the_serving_version(database: Database) -> None:
    end(database, begin(database, 1, 10))
    end(database, begin(database, 2, 11), "no answer to the smoke prompt")
    assert serving(database) == 1
    assert state(database, 11) == ("failed", "no answer to the smoke prompt")
    with database.read() as connection:
        event = read_after(connection, 0, ["deployment.failed"])[0]
        newest = deployments.newest_by_version(connection, model(), [1, 2, 3])
    assert {"name": "m", "version": 2, "reason": "no answer to the smoke prompt"}.items() <= event.payload.items()
    assert {number: deployment.status for number, deployment in newest.items()} == {1: "serving", 2: "failed"}


def test_ending_twice_writes_one_event(database: Database) -> None:
    deployment = begin(database, 1, 10)
    end(database, deployment)
    end(database, deployment)
    assert types(database) == ["deployment.started", "deployment.serving"]


@pytest.mark.requirement("O5")
def test_an_older_version_can_be_served_again(database: Database) -> None:
    for promotion, version in enumerate((1, 2, 1), start=10):
        end(database, begin(database, version, promotion))
    assert serving(database) == 1
    assert [state(database, promotion)[0] for promotion in (10, 11, 12)] == ["replaced", "replaced", "serving"]


def test_a_rolled_back_deployment_has_no_event(database: Database) -> None:
    with pytest.raises(RuntimeError), database.write() as connection:
        deployments.begin_deployment(connection, model(), version=1, promotion=1, url="u", sha256="0" * 64)
        raise RuntimeError
    assert types(database) == []


@pytest.fixture
def deploying(tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch) -> Deploying:
    return Deploying(tmp_path, database, monkeypatch)


def serve(deploying: Deploying, number: int) -> None:
    """Deploy version `number` successfully."""
    promotion = deploying.promote(number)
    end(deploying.versions.database, begin(deploying.versions.database, number, promotion.seq))


def test_failed_deployment_restores_the_served_version_in_the_registry(deploying: Deploying) -> None:
    for run in ("r1", "r2"):
        deploying.register(run)
    serve(deploying, 1)
    promotion = deploying.promote(2)
    with pytest.raises(dg.Failure, match="m version 2 is not deployed"):
        deploying.deploy(2, promotion)
    assert serving(deploying.versions.database) == 1
    assert deploying.versions.stages() == {1: "production", 2: "staging"}
    status, reason = state(deploying.versions.database, promotion.seq)
    assert status == "failed" and reason


def test_deployment_waits_for_a_restarting_engine(deploying: Deploying, monkeypatch: pytest.MonkeyPatch) -> None:
    deploying.register("r1")
    promotion = deploying.promote(1)
    answers = iter([EngineUnavailable("it is away"), EngineUnavailable("still"), None])

    def fake_deploy(_engine: EngineClient, **_asked: Any) -> None:
        if (answer := next(answers)) is not None:
            raise answer

    monkeypatch.setattr(EngineClient, "deploy", fake_deploy)
    monkeypatch.setattr("hanzo_ml_assets.deployment.ENGINE_TIMEOUT_SECONDS", 60.0)
    deploying.deploy(1, promotion)
    assert serving(deploying.versions.database) == 1
    assert deploying.versions.stages() == {1: "production"}


def test_an_export_with_a_flipped_bit_is_not_deployed_and_the_reason_names_the_file(deploying: Deploying) -> None:
    deploying.register("r1")
    path = deploying.plane.store.local_path("s3://hanzo-models/m/v1/gguf-q8_0/model.gguf")
    assert path is not None
    path.write_bytes(b"GGUF\xff")
    promotion = deploying.promote(1)
    with pytest.raises(dg.Failure):
        deploying.deploy(1, promotion)
    assert "model.gguf has SHA-256" in state(deploying.versions.database, promotion.seq)[1]
    assert deploying.versions.stages() == {1: "staging"}


def test_two_failed_promotions_leave_the_served_version_in_production(deploying: Deploying) -> None:
    """The second promotion came before the first was deployed.

    The version that it replaced in the registry had never served.
    """
    for run in ("r1", "r2", "r3"):
        deploying.register(run)
    serve(deploying, 1)
    second, third = deploying.promote(2), deploying.promote(3)
    for number, promotion in ((2, second), (3, third)):
        with pytest.raises(dg.Failure):
            deploying.deploy(number, promotion)
    assert serving(deploying.versions.database) == 1
    assert deploying.versions.stages()[1] == "production"


@pytest.mark.parametrize("stage", ["archived", "staging", "none"])
def test_a_version_that_leaves_production_without_a_successor_is_withdrawn(deploying: Deploying, stage: str) -> None:
    deploying.register("r1")
    serve(deploying, 1)
    promotion = deploying.versions.events("model.promoted")[-1].seq
    deploying.versions.promote(1, stage)
    assert state(deploying.versions.database, promotion) == ("withdrawing", "")
    assert serving(deploying.versions.database) is None
    assert [event.payload["version"] for event in deploying.versions.events("deployment.withdrawing")] == [1]


def test_replaced_version_serves_until_its_successor_does(deploying: Deploying) -> None:
    for run in ("r1", "r2"):
        deploying.register(run)
    serve(deploying, 1)
    deploying.promote(2)
    assert serving(deploying.versions.database) == 1


def test_undeployed_is_archived_then_withdrawn_and_only_then_deleted(deploying: Deploying) -> None:
    database = deploying.versions.database
    deploying.register("r1")
    assert refused(undeploy, database, model(), user="ann").code is ErrorCode.RESOURCE_DOES_NOT_EXIST
    serve(deploying, 1)
    first = undeploy(database, model(), user="ann")
    assert [deployment.status for deployment in first] == ["withdrawing"]
    assert undeploy(database, model(), user="ann") == first, "who died before the answer asks again"
    assert deploying.versions.stages() == {1: "archived"}
    edits, models = ModelVersionEdits(database), RegisteredModels(database)
    assert refused(edits.delete, model(), 1).code is ErrorCode.RESOURCE_CONFLICT
    with database.write() as connection:
        for deployment in first:
            deployments.mark_withdrawn(connection, deployment)
    assert refused(undeploy, database, model(), user="ann").code is ErrorCode.RESOURCE_DOES_NOT_EXIST
    assert models.rename(model(), "n").name == "n"
    models.delete(model("n"))
    assert [event.payload["organization"] for event in deploying.versions.events("deployment.withdrawn")] == ["default"]


def test_undeploy_withdraws_the_deploying_version_with_the_served_one(deploying: Deploying) -> None:
    for run in ("r1", "r2"):
        deploying.register(run)
    serve(deploying, 1)
    begin(deploying.versions.database, 2, deploying.promote(2).seq)
    left = undeploy(deploying.versions.database, model(), user="ann")
    assert [(deployment.version, deployment.status) for deployment in left] == [(1, "withdrawing"), (2, "withdrawing")]


@pytest.mark.parametrize("seen", [False, True], ids=["before the engine was called", "after it"])
def test_deployment_that_completes_after_its_withdrawal_is_withdrawn_again(deploying: Deploying, seen: bool) -> None:
    """The engine may have loaded it after the withdrawal request, so the request is repeated."""
    database = deploying.versions.database
    deploying.register("r1")
    promotion = deploying.promote(1)
    row = begin(database, 1, promotion.seq)
    undeploy(database, model(), user="ann")
    with database.write() as connection:
        if seen:
            deployments.mark_withdrawn(connection, row)
        assert not deployments.mark_serving(connection, row)
    assert state(database, promotion.seq) == ("withdrawing", "") and serving(database) is None


def test_death_of_a_worker_deploying_a_withdrawn_version_leaves_it_withdrawing(deploying: Deploying) -> None:
    database = deploying.versions.database
    deploying.register("r1")
    promotion = deploying.promote(1)
    row = begin(database, 1, promotion.seq)
    undeploy(database, model(), user="ann")
    with database.write() as connection:
        deployments.mark_withdrawn(connection, row)
    mark_superseded(promotion, deploying.plane)
    assert state(database, promotion.seq) == ("withdrawing", "")


def test_a_renamed_model_is_deployed_under_its_new_name(deploying: Deploying, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: its run was searched under the old name, so the production version never served."""
    database = deploying.versions.database
    deploying.plane.jobs.submit(name="m", config={"model": "m"}, user="u", organization="default", id="r1")
    deploying.register("r1")
    RegisteredModels(database).rename(model(), "n")
    deploying.versions.registry.promote(model("n"), 1, "production", user="ann")
    asked: list[str] = []
    monkeypatch.setattr(EngineClient, "deploy", lambda _, **request: asked.append(request["name"]))
    partitions = dg.DynamicPartitionsDefinition(name="m-runs")
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("m-runs", ["r1"])
        done = dg.materialize(
            [build_deployment(MODEL, partitions)],
            instance=instance,
            partition_key="r1",
            resources={"control_plane": deploying.plane},
        )
    assert done.success and asked == ["n"]
    assert serving(database, "n") == 1


def lose(database: Database) -> None:
    """Record that the engine lost the deployment that it should serve."""
    with database.write() as connection:
        (served,) = deployments.list_in_production(connection)
        assert deployments.mark_lost(connection, served, "the engine does not know it")


def test_lost_deployment_that_cannot_be_restored_is_withdrawn(deploying: Deploying) -> None:
    """Otherwise it would serve a version outside production once its file is repaired."""
    deploying.register("r1")
    serve(deploying, 1)
    promotion = deploying.versions.events("model.promoted")[-1]
    lose(deploying.versions.database)
    path = deploying.plane.store.local_path("s3://hanzo-models/m/v1/gguf-q8_0/model.gguf")
    assert path is not None
    path.write_bytes(b"GGUF\xff")
    with pytest.raises(dg.Failure):
        deploying.deploy(1, promotion)
    status, reason = state(deploying.versions.database, promotion.seq)
    assert status == "withdrawing" and "has SHA-256" in reason
    assert deploying.versions.stages() == {1: "staging"}
    assert [event.payload["version"] for event in deploying.versions.events("deployment.failed")] == [1]


def test_unavailable_engine_keeps_its_version_in_production(deploying: Deploying) -> None:
    deploying.register("r1")
    serve(deploying, 1)
    promotion = deploying.versions.events("model.promoted")[-1]
    lose(deploying.versions.database)
    with pytest.raises(dg.Failure, match="tried again"):
        deploying.deploy(1, promotion)
    assert state(deploying.versions.database, promotion.seq)[0] == "deploying"
    assert deploying.versions.stages() == {1: "production"}


def test_deployment_replaced_meanwhile_is_not_marked_lost(deploying: Deploying) -> None:
    for run in ("r1", "r2"):
        deploying.register(run)
    serve(deploying, 1)
    with deploying.versions.database.read() as connection:
        (seen,) = deployments.list_in_production(connection)
    deploying.promote(2)
    with deploying.versions.database.write() as connection:
        assert not deployments.mark_lost(connection, seen, "the engine has version 2")
    assert deploying.versions.events("deployment.lost") == []


def test_end_of_a_deployment_waits_for_an_uncommitted_withdrawal(database: Database) -> None:
    """Regression: it used a row read before the withdrawal, so a withdrawn version kept serving."""
    row = begin(database, 1, 10)
    served: list[bool] = []

    def ends() -> None:
        with database.write() as connection:
            served.append(deployments.mark_serving(connection, row))

    ending = threading.Thread(target=ends)
    with database.write() as connection:
        deployments.withdraw_model(connection, model())
        ending.start()
        ending.join(0.5)
    ending.join()
    assert (served, state(database, 10)) == ([False], ("withdrawing", ""))


def test_abandoned_deployment_is_replaced_by_a_later_one(database: Database) -> None:
    """Regression: it stayed `deploying`, blocked deletion of its version, and was retried on each poll."""
    begin(database, 1, 10)
    end(database, begin(database, 2, 11))
    assert (serving(database), state(database, 10)) == (2, ("replaced", ""))


def test_superseded_deployment_is_marked_replaced_once(deploying: Deploying) -> None:
    """Its worker died, and another version was promoted before the next worker started."""
    database = deploying.versions.database
    for run in ("r1", "r2"):
        deploying.register(run)
    first = deploying.promote(1)
    begin(database, 1, first.seq)
    second = deploying.promote(2)
    mark_superseded(first, deploying.plane)
    mark_superseded(first, deploying.plane)
    assert state(database, first.seq) == ("replaced", "")
    assert [event.payload["version"] for event in deploying.versions.events("deployment.replaced")] == [1]
    ModelVersionEdits(database).delete(model(), 1)
    assert deploying.versions.stages() == {2: "production"}
    assert second.seq > first.seq
