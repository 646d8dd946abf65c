"""Control plane, registry and store, with an engine that is not running."""

from pathlib import Path
from typing import Any

import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import DeploymentTarget, ModelDefinition
from hanzo_ml_assets.deployment import deploy_version
from resources.metadata.database import Database
from resources.metadata.registry import deployments
from resources.metadata.registry.deployments import Deployment
from tests.support.resources.model_versions import RegisteredVersions, model
from tests.support.server_process import free_port


def begin(database: Database, version: int, promotion: int, name: str = "m") -> Deployment:
    with database.write() as connection:
        return deployments.begin_deployment(
            connection, model(name), version=version, promotion=promotion, url="http://engine", sha256="0" * 64
        )


def end(database: Database, deployment: Deployment, reason: str = "") -> None:
    with database.write() as connection:
        if reason:
            deployments.mark_failed(connection, deployment, reason)
        else:
            deployments.mark_serving(connection, deployment)


def serving(database: Database, name: str = "m") -> int | None:
    with database.read() as connection:
        found = deployments.find_serving(connection, model(name))
    return found.version if found else None


def state(database: Database, promotion: int) -> tuple[str, str]:
    with database.read() as connection:
        found = deployments.find_by_promotion(connection, promotion)
    assert found is not None
    return found.status, found.reason


MODEL = ModelDefinition(name="m", dataset="d", recipe="r", deployment=DeploymentTarget(smoke_prompts=("Hello?",)))


class Deploying:
    """The real control plane, registry and store, with an unreachable engine."""

    def __init__(self, folder: Path, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HANZO_ML_HOME", str(folder))
        monkeypatch.setenv("HANZO_ML_ENGINE_PORT", str(free_port()))
        monkeypatch.setenv("HANZO_ML_DATABASE_URL", database.url)
        monkeypatch.setattr("hanzo_ml_assets.deployment.ENGINE_TIMEOUT_SECONDS", 0.0)
        self.versions = RegisteredVersions(database)
        self.plane = ControlPlane()
        self.folder = folder

    def register(self, run: str) -> int:
        number = self.versions.register(run, exported=False).version
        export = self.folder / f"export-{number}"
        export.mkdir()
        (export / "model.gguf").write_bytes(b"GGUF" + bytes([number]))
        made = self.plane.store.publish(export, f"s3://hanzo-models/m/v{number}/gguf-q8_0", "gguf")
        with self.versions.database.write() as connection:
            version = self.versions.registry.get(model(), number, connection)
            self.versions.registry.add_artifacts(connection, version, {"gguf": made})
        return number

    def promote(self, number: int) -> Any:
        self.versions.promote(number)
        return self.versions.events("model.promoted")[-1]

    def deploy(self, number: int, promotion: Any) -> None:
        deploy_version(MODEL, self.versions.registry.read(model(), number), promotion, self.plane)
