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
from tests.support.sensors.sensor_harness import MODEL, SensorHarness, failed_run, harness, keys, repository

__all__ = ["harness", "repository"]  # fixtures

SHA256 = "0" * 64
Start = Callable[..., Gateway]


@pytest.fixture
def start(harness: SensorHarness, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start the engine with the state that it served before."""
    port = free_port()
    monkeypatch.setenv("HANZO_ML_ENGINE_PORT", str(port))
    harness.plane.database.close()
    harness.plane = ControlPlane()  # settings are read once
    started: list[Gateway] = []

    def begin(**served: Any) -> Gateway:
        state = harness.folder / "engine"
        state.mkdir()
        if served:
            (state / "deployments.json").write_text(json.dumps([{"name": MODEL, "sha256": SHA256, **served}]))
        started.append(Gateway(state, port))
        return started[-1]

    yield begin
    for gateway in started:
        gateway.kill()


def serve(harness: SensorHarness) -> int:
    """Record version 1 as serving; return its promotion."""
    harness.register("run-1")
    promotion = harness.promote(1)
    harness.tick(deploy_promotions)
    harness.begin_deployment(1, promotion, "serving")
    return promotion


def lost(harness: SensorHarness) -> list[Event]:
    with harness.plane.database.read() as connection:
        return read_after(connection, 0, [deployments.LOST_EVENT])


def row(harness: SensorHarness, promotion: int) -> tuple[str, str]:
    with harness.plane.database.read() as connection:
        found = deployments.find_by_promotion(connection, promotion)
    assert found is not None
    return found.status, found.reason


def test_version_missing_in_the_engine_is_reported_and_redeployed_once(harness: SensorHarness, start: Start) -> None:
    promotion = serve(harness)
    start()
    for _ in range(2):
        harness.tick(watch_serving)
    (event,) = lost(harness)
    assert event.payload["reason"] == "the engine does not know it"
    assert row(harness, promotion) == ("deploying", "the engine does not know it")
    (request,) = harness.tick(deploy_promotions)
    assert (request.run_key, request.partition_key) == (f"deploy-{event.seq}", "run-1")
    assert keys(request) == [f"models/{MODEL}/deployment"]
    assert harness.asset_events == [], "nobody promoted anything"
    harness.begin_deployment(1, promotion, "serving")
    harness.reset()
    assert harness.tick(deploy_promotions) == []


@pytest.mark.parametrize(("retries", "losses"), [(19, 1), (20, 2)])
def test_lost_version_is_redeployed_when_the_engine_returns_after_failed_retries(
    harness: SensorHarness, start: Start, retries: int, losses: int
) -> None:
    """All retries had failed, and it stayed `deploying` forever."""
    promotion = serve(harness)
    gateway = start()
    harness.tick(watch_serving)
    failed_run(harness, ("deployment",), "run-1", **{RETRIES_TAG: str(retries)})
    gateway.kill()
    harness.tick(watch_serving)
    assert len(lost(harness)) == 1, "the engine is away"
    harness.tick(deploy_promotions)
    gateway.start()
    harness.tick(watch_serving)
    assert len(lost(harness)) == losses
    assert row(harness, promotion)[0] == "deploying"
    assert [request.partition_key for request in harness.tick(deploy_promotions)] == ["run-1"] * (losses - 1)


@pytest.mark.requirement("P6")
def test_corrupt_file_refused_by_a_restarted_engine_is_reported(harness: SensorHarness, start: Start) -> None:
    serve(harness)
    (harness.folder / "model.gguf").write_bytes(b"GGUF, but other bytes than were registered")
    gateway = start(version=1, path=str(harness.folder / "model.gguf"))
    wait_until(lambda: gateway.engine.served()[0].status == "refused")
    harness.tick(watch_serving)
    (event,) = lost(harness)
    assert "the engine refuses it: " in event.payload["reason"] and "has SHA-256" in event.payload["reason"]


def test_engine_serving_another_version_than_recorded_is_reported(harness: SensorHarness, start: Start) -> None:
    """It was killed during the swap, and returned when its deployment had been abandoned."""
    serve(harness)
    start(version=2, path=str(harness.folder / "model.gguf"))
    harness.tick(watch_serving)
    (event,) = lost(harness)
    assert event.payload["reason"] == f"the engine has version 2 with SHA-256 {SHA256}"


def test_unreachable_engine_is_not_reported_as_lost_versions(harness: SensorHarness) -> None:
    serve(harness)
    harness.tick(watch_serving)
    assert lost(harness) == []


@pytest.mark.parametrize("begun", [False, True])
def test_version_about_to_be_replaced_is_not_reported(harness: SensorHarness, start: Start, begun: bool) -> None:
    serve(harness)
    harness.register("run-2")
    promotion = harness.promote(2)
    if begun:
        harness.begin_deployment(2, promotion, "deploying")
    start()
    harness.tick(watch_serving)
    assert lost(harness) == []


@pytest.mark.parametrize("status", ["serving", "loading"])
def test_served_version_equal_to_the_record_has_no_difference(
    harness: SensorHarness, status: Literal["serving", "loading"]
) -> None:
    """Also while a restarted engine still loads it."""
    promotion = serve(harness)
    with harness.plane.database.read() as connection:
        recorded = deployments.find_by_promotion(connection, promotion)
    assert recorded is not None
    served = Served(name=MODEL, version=1, path=Path("/m.gguf"), sha256=SHA256, status=status, loaded_at=datetime.now(UTC))
    assert find_difference(recorded, served) is None
    assert find_difference(recorded, served.model_copy(update={"sha256": "1" * 64})) is not None


@pytest.mark.slow
def test_an_engine_that_lost_its_state_serves_again(harness: SensorHarness, start: Start) -> None:
    version = harness.register("run-1", exported=False)
    folder = harness.folder / "export"
    export_gguf(make_tiny_model(harness.folder / "tiny", 0), folder / "model.gguf", "F16")
    export = harness.plane.store.publish(folder, f"s3://hanzo-models/{MODEL}/v1/gguf-f16", "gguf")
    with harness.plane.database.write() as connection:
        harness.plane.registry.add_artifacts(connection, version, {"gguf": export})
    harness.promote(1)
    definition = ModelDefinition(name=MODEL, dataset="d", recipe="r", deployment=DeploymentTarget(smoke_prompts=("Who?",)))

    def deployed() -> None:
        found = harness.plane.registry.read(model_key(MODEL), 1)
        with harness.plane.database.read() as connection:
            promotion = find_last_promotion(connection, found)
        assert promotion is not None
        deploy_version(definition, found, promotion, harness.plane)

    gateway = start()
    deployed()
    gateway.kill()
    shutil.rmtree(gateway.state_dir)
    gateway.start()
    harness.tick(watch_serving)
    assert len(lost(harness)) == 1
    deployed()
    harness.tick(watch_serving)
    assert len(lost(harness)) == 1
    assert [served.status for served in gateway.engine.served()] == ["serving"]


def test_version_marked_lost_but_served_is_recorded_as_serving(
    harness: SensorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine returned with its state after an outage."""
    promotion = serve(harness)
    with harness.plane.database.write() as connection:
        (recorded,) = deployments.list_in_production(connection)
        assert deployments.mark_lost(connection, recorded, "the engine does not know it")
        assert not deployments.mark_lost(connection, recorded, "the engine does not know it"), "somebody else saw it first"
    failed_run(harness, ("deployment",), "run-1", **{RETRIES_TAG: "20"})
    name = recorded.model.served_name
    served = Served(name=name, version=1, path=harness.folder / "model.gguf", sha256=recorded.sha256, status="serving")
    monkeypatch.setattr(type(harness.plane.engine), "served", lambda engine: [served])
    harness.tick(watch_serving)
    assert row(harness, promotion) == ("serving", "")
    assert len(lost(harness)) == 1
