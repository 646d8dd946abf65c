"""Deployment to pulling replicas: the asset waits for their reports and rolls back accordingly."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from resources.metadata.database import Database
from resources.metadata.registry import deployments, engine_replicas
from resources.metadata.registry.engine_replicas import DeploymentFile
from resources.metadata.registry.undeployment import undeploy
from resources.serving.replicated_engine import ReplicatedEngine
from sensors.watch_serving import find_difference
from tests.resources.serving.gateway_process import wait_until
from tests.support.resources.deployments import Deploying, serving, state
from tests.support.resources.model_versions import model

Answer = Callable[[DeploymentFile], dict[str, Any]]


def serve(file: DeploymentFile) -> dict[str, Any]:
    return {"status": "serving", "reason": "", "error_code": ""}


def fail(file: DeploymentFile) -> dict[str, Any]:
    return {"status": "failed", "reason": "it gave an empty answer", "error_code": "SMOKE_FAILED"}


def load(file: DeploymentFile) -> dict[str, Any]:
    return {"status": "loading", "reason": "downloading", "error_code": ""}


class Replicas:
    """Replicas that report on each wanted deployment what a function returns."""

    def __init__(self, database: Database, **answers: Answer) -> None:
        self.database, self.answers = database, answers
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._report_forever)

    def __enter__(self) -> "Replicas":
        self._thread.start()
        wait_until(lambda: self.live() == set(self.answers))
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def live(self) -> set[str]:
        with self.database.read() as connection:
            return {replica.id for replica in engine_replicas.list_live_replicas(connection)}

    def _report_forever(self) -> None:
        while not self._stopped.wait(0.1):
            for replica, answer in list(self.answers.items()):
                with self.database.write() as connection:
                    reports = [
                        {
                            "deployment": file.id,
                            "attempt": file.attempt,
                            "name": file.model.served_name,
                            "version": file.version,
                            "sha256": file.sha256,
                            **answer(file),
                        }
                        for file in engine_replicas.list_wanted(connection)
                    ]
                    engine_replicas.record_report(connection, replica, {"ready": True, "deployments": reports})


@pytest.fixture
def deploying(tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch) -> Deploying:
    monkeypatch.setenv("HANZO_ML_ENGINE_MODE", "pull")
    monkeypatch.setattr("resources.serving.replicated_engine.POLL_SECONDS", 0.05)
    deploying = Deploying(tmp_path, database, monkeypatch)
    assert isinstance(deploying.plane.engine, ReplicatedEngine)
    for run in ("r1", "r2"):
        deploying.register(run)
    return deploying


def test_version_serves_once_all_live_replicas_serve_it(deploying: Deploying, database: Database) -> None:
    with Replicas(database, a=serve, b=load) as replicas:
        promotion = deploying.promote(1)
        done = threading.Thread(target=deploying.deploy, args=(1, promotion))
        done.start()
        wait_until(lambda: reports(database) == {"a": "serving", "b": "loading"})
        assert serving(database) is None
        replicas.answers["b"] = serve
        done.join()
    assert serving(database) == 1
    plane = ControlPlane()
    assert [(each.version, each.status) for each in plane.engine.served()] == [(1, "serving")]


def test_version_that_one_replica_cannot_load_is_rolled_back_with_its_reason(
    deploying: Deploying, database: Database
) -> None:
    with Replicas(database, a=serve, b=serve) as replicas:
        deploying.deploy(1, deploying.promote(1))
        replicas.answers["b"] = lambda file: fail(file) if file.version == 2 else serve(file)
        promotion = deploying.promote(2)
        with pytest.raises(dg.Failure, match="m version 2 is not deployed: replica b: it gave an empty answer"):
            deploying.deploy(2, promotion)
    assert serving(database) == 1
    assert deploying.versions.stages() == {1: "production", 2: "staging"}
    assert state(database, promotion.seq) == ("failed", "replica b: it gave an empty answer")
    with database.read() as connection:
        assert [each.version for each in engine_replicas.list_wanted(connection)] == [1]


def test_deployment_without_replicas_fails_with_a_hint_to_the_pods(
    deploying: Deploying, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resources.serving.replicated_engine.ABSENT_SECONDS", 0.1)
    with pytest.raises(dg.Failure, match=r"no replica of the engine reports .*: check the pods"):
        deploying.deploy(1, deploying.promote(1))


def test_version_that_is_withdrawn_while_replicas_load_it_ends_the_wait(deploying: Deploying, database: Database) -> None:
    failures: list[dg.Failure] = []

    def deploy() -> None:
        try:
            deploying.deploy(1, promotion)
        except dg.Failure as failure:
            failures.append(failure)

    with Replicas(database, a=load):
        promotion = deploying.promote(1)
        thread = threading.Thread(target=deploy)
        thread.start()
        wait_until(lambda: state_or_none(database, promotion.seq) == "deploying")
        undeploy(database, model(), user="ann")
        thread.join(30)
    assert "taken out of service while it was deployed" in str(failures[0].description)


def state_or_none(database: Database, promotion: int) -> str | None:
    try:
        return state(database, promotion)[0]
    except AssertionError:
        return None


def test_version_that_was_rolled_back_does_not_count_as_a_difference(deploying: Deploying, database: Database) -> None:
    """A replica answers with it until it has loaded the wanted version again."""
    with Replicas(database, a=serve):
        deploying.deploy(1, deploying.promote(1))
    with database.write() as connection:
        (file,) = engine_replicas.list_wanted(connection)
        report = {"attempt": 0, "name": file.model.served_name, "sha256": "f" * 64, "status": "serving"}
        known = {"deployment": file.id, "version": 1, **report, "sha256": file.sha256, "status": "loading"}
        other = {"deployment": file.id + 1, "version": 2, **report}
        engine_replicas.record_report(connection, "a", {"ready": True, "deployments": [known, other]})
    (served,) = deploying.plane.engine.served()
    assert (served.version, served.status) == (1, "loading")
    with database.read() as connection:
        (recorded,) = deployments.list_in_production(connection)
    assert find_difference(recorded, served) is None


def test_failure_of_an_earlier_attempt_does_not_count(deploying: Deploying, database: Database) -> None:
    """The deploying run was killed and is retried: replicas try once more."""
    promotion = deploying.promote(1)
    with Replicas(database, a=lambda file: fail(file) if file.attempt == 1 else serve(file)) as replicas:
        with database.write() as connection:
            row = deployments.begin_deployment(
                connection, model(), version=1, promotion=promotion.seq, url="http://engine", sha256="0" * 64
            )
            engine_replicas.record_file(connection, row, uri="s3://hanzo-models/m", size_bytes=1, smoke_prompts=("Who?",))
        wait_until(lambda: reports(database) == {"a": "failed"})
        deploying.deploy(1, promotion)
    assert replicas.answers.keys() == {"a"} and serving(database) == 1


def reports(database: Database) -> dict[str, str]:
    """Return what each replica reports on the one wanted deployment."""
    with database.read() as connection:
        replicas = engine_replicas.list_live_replicas(connection)
    return {replica.id: each["status"] for replica in replicas for each in replica.report["deployments"]}
