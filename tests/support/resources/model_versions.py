"""Registered model versions, and what the registry refuses."""

import dataclasses
from typing import Any

import pytest

from recipes.storage.manifest import Artifact
from resources.errors import HanzoError
from resources.metadata.database import Database
from resources.metadata.outbox import Event, read_after
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.search import page_versions
from resources.metadata.registry.version_lifecycle import ModelVersion, Registration, Registry


def artifact(kind: str, number: int = 0) -> Artifact:
    return Artifact(kind=kind, uri=f"s3://hanzo-models/m/v{number}/{kind}", digest=f"{number:064x}", size_bytes=5)


def registration(run_id: str) -> Registration:
    texts: dict[str, Any] = {field.name: "x" for field in dataclasses.fields(Registration)}
    return Registration(**{**texts, "run_id": run_id, "metrics": {"loss": 1.0}, "training_config": {}, "tags": {}})


def model(name: str = "m", organization: str = "default") -> ModelKey:
    return ModelKey(organization, name)


class RegisteredVersions:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.registry = Registry(self.database)

    def register(self, run: str, name: str = "m", *, exported: bool = True, **more: Any) -> ModelVersion:
        with self.database.write() as connection:
            adapter = {"adapter": artifact("adapter")}
            version = self.registry.register(connection, model(name), registration(run), adapter, **more)
            if exported:
                self.registry.add_artifacts(connection, version, {"gguf": artifact("gguf", version.version)})
            return self.registry.get(model(name), version.version, connection)

    def promote(self, number: int, stage: str = "production", **more: Any) -> ModelVersion:
        return self.registry.promote(model("m"), number, stage, user="ann", **more)

    def stages(self) -> dict[int, str]:
        return {version.version: version.stage for version in page_versions(self.database, model("m"))[0]}

    def events(self, type: str) -> list[Event]:
        with self.database.read() as connection:
            return read_after(connection, 0, [type], limit=1000)

    def restore(self, number: int, previous: int | None, reason: str = "it answered nonsense") -> None:
        with self.database.write() as connection:
            version = self.registry.get(model("m"), number, connection)
            self.registry.restore(connection, version, previous, reason)


def refused(call: Any, *arguments: Any, **more: Any) -> HanzoError:
    with pytest.raises(HanzoError) as caught:
        call(*arguments, **more)
    assert "\n" not in caught.value.message
    return caught.value
