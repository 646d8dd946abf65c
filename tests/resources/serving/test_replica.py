"""Replicas as real processes with the real API: promotion, rollback, outages, restarts, broken files."""

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from resources.errors import ChecksumMismatch, EngineUnavailable, SmokeFailed
from resources.metadata.registry import deployments
from tests.resources.serving.gateway_process import wait_until
from tests.resources.serving.replica_process import ControlPlaneProcess, ReplicaProcess
from tests.support.resources.gateway import PROMPTS, Load, Model, broken, models

__all__ = ["models"]  # a fixture

Start = Callable[..., ReplicaProcess]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlaneProcess]:
    home = tmp_path / "api"
    home.mkdir()
    plane = ControlPlaneProcess(home)
    plane.server.start()
    yield plane
    plane.close()


@pytest.fixture
def start(tmp_path: Path, plane: ControlPlaneProcess) -> Iterator[Start]:
    """Start replicas of the engine, each with its own folder."""
    started: list[ReplicaProcess] = []

    def begin(**settings: str) -> ReplicaProcess:
        started.append(ReplicaProcess(tmp_path / f"replica-{len(started)}", plane.server.url, **settings))
        return started[-1]

    yield begin
    for replica in started:
        replica.kill()


def deploy(plane: ControlPlaneProcess, model: Model, version: int, name: str = "keeper") -> deployments.Deployment:
    return plane.deploy(version, plane.upload(f"{name}/v{version}", model.path), model.sha256, name)


def test_replica_is_ready_once_wanted_model_answers(plane: ControlPlaneProcess, start: Start, models: list[Model]) -> None:
    uri = plane.upload("keeper/v3", models[0].path)
    row, attempt = plane.begin(3, uri, models[0].sha256)
    replica = start()
    assert not replica.ready()["ready"]
    replica.wait_ready()
    plane.engine.await_serving(row, attempt, 60)
    (served,) = replica.engine.served()
    assert (served.name, served.version, served.deployment, served.sha256) == ("keeper", 3, row.id, models[0].sha256)
    assert replica.engine.chat("keeper", PROMPTS[0], max_tokens=8)
    (seen,) = plane.engine.served()
    assert (seen.version, seen.sha256, seen.status, len(seen.smoke)) == (3, models[0].sha256, "serving", 1)
    assert plane.engine.served_hashes("keeper") == {models[0].sha256}
    assert replica.get("/deployments") is not None
    assert httpx.post(f"{replica.url}/deployments", json={}).status_code == 405, "nothing can be pushed to it"


def test_replica_without_wanted_models_is_ready(start: Start) -> None:
    start().wait_ready()


@pytest.mark.slow
def test_promotion_under_load_fails_no_request(plane: ControlPlaneProcess, start: Start, models: list[Model]) -> None:
    replicas = [start(), start()]
    first = deploy(plane, models[0], 1)
    assert plane.states(first) == ["serving", "serving"]
    with Load(replicas[0]) as load, Load(replicas[1]) as other:
        for each in (load, other):
            wait_until(partial(each.has_met, 1))
        second = deploy(plane, models[1], 2)
        assert plane.states(second) == ["serving", "serving"]
        for each in (load, other):
            wait_until(partial(each.has_met, 2))
    assert load.failures == other.failures == []
    files = list((replicas[0].home / "engine" / "files").iterdir())
    wait_until(lambda: len(list((replicas[0].home / "engine" / "files").iterdir())) == 1)
    assert files, "what serves stays in the cache"


def test_version_that_fails_its_smoke_test_leaves_the_previous_one(
    plane: ControlPlaneProcess, start: Start, models: list[Model], tmp_path: Path
) -> None:
    replica = start()
    deploy(plane, models[0], 1)
    with pytest.raises(SmokeFailed, match=r"replica .*: keeper version 2 was not deployed: .* not finite"):
        deploy(plane, broken(models[1], tmp_path / "nan.gguf"), 2)
    assert [(each.version, each.status) for each in replica.engine.served()] == [(1, "serving")]
    assert replica.engine.chat("keeper", PROMPTS[0], max_tokens=8)
    assert [(each.version, each.status) for each in plane.engine.served()] == [(1, "serving")]


@pytest.mark.slow
def test_replicas_roll_back_a_version_that_only_one_could_load(
    plane: ControlPlaneProcess, start: Start, models: list[Model]
) -> None:
    """The replica that had swapped returns to the previous version."""
    replicas = [start(), start()]
    deploy(plane, models[0], 1)
    row, _ = plane.begin(2, plane.upload("keeper/v2", models[1].path), models[1].sha256)
    wait_until(lambda: plane.states(row) == ["serving", "serving"], 60)
    with plane.database.write() as connection:
        deployments.mark_failed(connection, row, "the other replica could not load it")
    for replica in replicas:
        wait_until(lambda: replica.engine.served()[0].version == 1, 60)  # noqa: B023


def test_broken_version_leaves_other_models_serving(
    plane: ControlPlaneProcess, start: Start, models: list[Model], tmp_path: Path
) -> None:
    """This includes a replica that starts when a production version can no longer be loaded."""
    first = start()
    deploy(plane, models[0], 1)
    deploy(plane, models[1], 1, name="other")
    path = plane.store.local_path("s3://hanzo-models/other/v1/model.gguf")
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    second = start()
    second.wait_ready()
    assert second.engine.chat("keeper", PROMPTS[0], max_tokens=8)
    assert first.engine.chat("other", PROMPTS[0], max_tokens=8)
    report = next(each for each in plane.replicas() if each.id.endswith(str(second.port)))
    states = {each["name"]: (each["status"], each["error_code"]) for each in report.report["deployments"]}
    assert states == {"keeper": ("serving", ""), "other": ("failed", "CHECKSUM_MISMATCH")}
    assert {each.name: each.status for each in plane.engine.served()} == {"keeper": "serving", "other": "serving"}


@pytest.mark.requirement("P6")
def test_corrupted_download_is_refused(
    plane: ControlPlaneProcess, start: Start, models: list[Model], tmp_path: Path
) -> None:
    replica = start()
    flipped = tmp_path / "flipped.gguf"
    content = bytearray(models[0].path.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    uri = plane.upload("keeper/v1", flipped)
    with pytest.raises(ChecksumMismatch, match="the download has SHA-256"):
        plane.deploy(1, uri, models[0].sha256)
    assert replica.engine.served() == []
    wait_until(lambda: list((replica.home / "engine" / "files").iterdir()) == [])


def test_replica_serves_during_an_api_outage_and_restarts_from_its_cache(
    plane: ControlPlaneProcess, start: Start, models: list[Model]
) -> None:
    replica = start()
    deploy(plane, models[0], 1)
    plane.server.kill()
    with Load(replica) as load:
        wait_until(lambda: "is unavailable" in replica.log.read_text())
        wait_until(partial(load.has_met, 1))
    assert load.failures == []
    replica.kill()
    replica.start()
    replica.wait_ready()
    assert replica.engine.chat("keeper", PROMPTS[0], max_tokens=8)
    assert replica.log.read_text().count("; loaded models keep serving") == 2, "once for each start"

    fresh = start()
    wait_until(lambda: "waiting for the API" in fresh.ready()["reason"])
    plane.server.start()
    fresh.wait_ready()
    second = deploy(plane, models[1], 2)
    assert plane.states(second) == ["serving", "serving"]


def test_replica_that_is_stopped_answers_until_it_has_drained(
    plane: ControlPlaneProcess, start: Start, models: list[Model]
) -> None:
    replica = start()
    deploy(plane, models[0], 1)
    replica.process.send_signal(signal.SIGTERM)
    wait_until(lambda: replica.ready()["reason"] == "the replica is shutting down")
    body = {"model": "keeper", "prompt": "The lamp", "max_tokens": 4}
    answer = httpx.post(f"{replica.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.headers["connection"] == "close"
    wait_until(lambda: plane.replicas() == [])
    assert replica.process.wait(timeout=60) == 0


def test_model_that_is_no_longer_wanted_is_removed(plane: ControlPlaneProcess, start: Start, models: list[Model]) -> None:
    replica = start()
    row = deploy(plane, models[0], 1)
    with plane.database.write() as connection:
        deployments.withdraw_model(connection, row.model)
    with pytest.raises(EngineUnavailable, match="still serve"):
        plane.engine.remove("keeper", row.id)
    wait_until(lambda: replica.engine.served() == [])
    wait_until(lambda: plane.replicas()[0].deployment(row.id) is None)
    wait_until(lambda: replica.backends() == [])
