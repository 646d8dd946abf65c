"""Serving that differs from the record is reported once and redeployed.

Deployments in progress are left alone.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import DeploymentTarget, ModelDefinition
from hanzo_ml_assets.deployment import deploy_version, find_last_promotion
from recipes.export.gguf import export_gguf
from resources.metadata.outbox import Event, read_after
from resources.metadata.registry import deployments
from resources.serving.client import Served
from sensors.decisions.retry_policy import RETRIES_TAG
from sensors.deploy_promotions import deploy_promotions
from sensors.watch_serving import find_difference, watch_serving
from tests.recipes.tiny_model import make_tiny_model
from tests.resources.serving.gateway_process import Gateway, free_port, wait_until
from tests.support.resources.model_versions import model as model_key
from tests.support.sensors.sensor_house import MODEL, House, failed_run, house, keys, repository

__all__ = ["house", "repository"]  # fixtures

SHA256 = "0" * 64
Start = Callable[..., Gateway]


@pytest.fixture
def start(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start the engine with the state that it served before."""
    port = free_port()
    monkeypatch.setenv("HANZO_ML_ENGINE_PORT", str(port))
    house.plane.database.close()
    house.plane = ControlPlane()  # settings are read once
    started: list[Gateway] = []

    def begin(**served: Any) -> Gateway:
        state = house.folder / "engine"
        state.mkdir()
        if served:
            (state / "deployments.json").write_text(json.dumps([{"name": MODEL, "sha256": SHA256, **served}]))
        started.append(Gateway(state, port))
        return started[-1]

    yield begin
    for gateway in started:
        gateway.kill()


def serve(house: House) -> int:
    """Record version 1 as serving; return its promotion."""
    house.register("run-1")
    promotion = house.promote(1)
    house.tick(deploy_promotions)
    house.begin_deployment(1, promotion, "serving")
    return promotion


def lost(house: House) -> list[Event]:
    with house.plane.database.read() as connection:
        return read_after(connection, 0, [deployments.LOST_EVENT])


def row(house: House, promotion: int) -> tuple[str, str]:
    with house.plane.database.read() as connection:
        found = deployments.find_by_promotion(connection, promotion)
    assert found is not None
    return found.status, found.reason


def test_version_missing_in_the_engine_is_reported_and_redeployed_once(house: House, start: Start) -> None:
    promotion = serve(house)
    start()
    for _ in range(2):
        house.tick(watch_serving)
    (event,) = lost(house)
    assert event.payload["reason"] == "the engine does not know it"
    assert row(house, promotion) == ("deploying", "the engine does not know it")
    (request,) = house.tick(deploy_promotions)
    assert (request.run_key, request.partition_key) == (f"deploy-{event.seq}", "run-1")
    assert keys(request) == [f"models/{MODEL}/deployment"]
    assert house.asset_events == [], "nobody promoted anything"
    house.begin_deployment(1, promotion, "serving")
    house.reset()
    assert house.tick(deploy_promotions) == []


@pytest.mark.parametrize(("retries", "told"), [(19, 1), (20, 2)])
def test_lost_version_is_redeployed_when_the_engine_returns_after_failed_retries(
    house: House, start: Start, retries: int, told: int
) -> None:
    """All retries had failed, and it stayed `deploying` forever."""
    promotion = serve(house)
    gateway = start()
    house.tick(watch_serving)
    failed_run(house, ("deployment",), "run-1", **{RETRIES_TAG: str(retries)})
    gateway.kill()
    house.tick(watch_serving)
    assert len(lost(house)) == 1, "the engine is away"
    house.tick(deploy_promotions)
    gateway.start()
    house.tick(watch_serving)
    assert len(lost(house)) == told
    assert row(house, promotion)[0] == "deploying"
    assert [request.partition_key for request in house.tick(deploy_promotions)] == ["run-1"] * (told - 1)


@pytest.mark.requirement("P6")
def test_corrupt_file_refused_by_a_restarted_engine_is_reported(house: House, start: Start) -> None:
    serve(house)
    (house.folder / "model.gguf").write_bytes(b"GGUF, but other bytes than were registered")
    gateway = start(version=1, path=str(house.folder / "model.gguf"))
    wait_until(lambda: gateway.engine.served()[0].status == "refused")
    house.tick(watch_serving)
    (event,) = lost(house)
    assert "the engine refuses it: " in event.payload["reason"] and "has SHA-256" in event.payload["reason"]


def test_engine_serving_another_version_than_recorded_is_reported(house: House, start: Start) -> None:
    """It was killed during the swap, and returned when its deployment had been abandoned."""
    serve(house)
    start(version=2, path=str(house.folder / "model.gguf"))
    house.tick(watch_serving)
    (event,) = lost(house)
    assert event.payload["reason"] == f"the engine has version 2 with SHA-256 {SHA256}"


def test_unreachable_engine_is_not_reported_as_lost_versions(house: House) -> None:
    serve(house)
    house.tick(watch_serving)
    assert lost(house) == []


@pytest.mark.parametrize("begun", [False, True])
def test_version_about_to_be_replaced_is_not_reported(house: House, start: Start, begun: bool) -> None:
    serve(house)
    house.register("run-2")
    promotion = house.promote(2)
    if begun:
        house.begin_deployment(2, promotion, "deploying")
    start()
    house.tick(watch_serving)
    assert lost(house) == []


@pytest.mark.parametrize("status", ["serving", "loading"])
def test_served_version_equal_to_the_record_has_no_difference(house: House, status: Literal["serving", "loading"]) -> None:
    """Also while a restarted engine still loads it."""
    promotion = serve(house)
    with house.plane.database.read() as connection:
        recorded = deployments.find_by_promotion(connection, promotion)
    assert recorded is not None
    served = Served(name=MODEL, version=1, path=Path("/m.gguf"), sha256=SHA256, status=status, loaded_at=datetime.now(UTC))
    assert find_difference(recorded, served) is None
    assert find_difference(recorded, served.model_copy(update={"sha256": "1" * 64})) is not None


@pytest.mark.slow
def test_an_engine_that_lost_its_state_serves_again(house: House, start: Start) -> None:
    version = house.register("run-1", exported=False)
    folder = house.folder / "export"
    export_gguf(make_tiny_model(house.folder / "tiny", 0), folder / "model.gguf", "F16")
    export = house.plane.store.publish(folder, f"s3://hanzo-models/{MODEL}/v1/gguf-f16", "gguf")
    with house.plane.database.write() as connection:
        house.plane.registry.add_artifacts(connection, version, {"gguf": export})
    house.promote(1)
    definition = ModelDefinition(name=MODEL, dataset="d", recipe="r", deployment=DeploymentTarget(smoke_prompts=("Who?",)))

    def deployed() -> None:
        found = house.plane.registry.read(model_key(MODEL), 1)
        with house.plane.database.read() as connection:
            promotion = find_last_promotion(connection, found)
        assert promotion is not None
        deploy_version(definition, found, promotion, house.plane)

    gateway = start()
    deployed()
    gateway.kill()
    shutil.rmtree(gateway.state_dir)
    gateway.start()
    house.tick(watch_serving)
    assert len(lost(house)) == 1
    deployed()
    house.tick(watch_serving)
    assert len(lost(house)) == 1
    assert [served.status for served in gateway.engine.served()] == ["serving"]


def test_version_marked_lost_but_served_is_recorded_as_serving(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine returned with its state after an outage."""
    promotion = serve(house)
    with house.plane.database.write() as connection:
        (recorded,) = deployments.list_in_production(connection)
        assert deployments.mark_lost(connection, recorded, "the engine does not know it")
        assert not deployments.mark_lost(connection, recorded, "the engine does not know it"), "somebody else saw it first"
    failed_run(house, ("deployment",), "run-1", **{RETRIES_TAG: "20"})
    name = recorded.model.served_name
    served = Served(name=name, version=1, path=house.folder / "model.gguf", sha256=recorded.sha256, status="serving")
    monkeypatch.setattr(type(house.plane.engine), "served", lambda engine: [served])
    house.tick(watch_serving)
    assert row(house, promotion) == ("serving", "")
    assert len(lost(house)) == 1
