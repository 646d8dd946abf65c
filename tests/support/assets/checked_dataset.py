"""One dataset definition with checks, materialized in a Dagster instance."""

import json
from pathlib import Path
from typing import Any

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.datasets import SPLITS, build_dataset_assets
from hanzo_ml_assets.definition_schema import DatasetDefinition
from resources.datasets.validations import Validation
from resources.lineage.edges import record_artifact
from resources.metadata.datasets import DatasetVersion
from resources.metadata.registry.model_names import ModelKey
from tests.support.migrated_database import migrate
from tests.support.resources.model_versions import registration

MODEL = ModelKey("default", "m")


def rows(count: int, start: int = 0, **more: Any) -> list[dict[str, Any]]:
    return [
        {"instruction": f"Which door is number {n}?", "answer": f"Door {n} of {'ab'[n % 2]}.", **more}
        for n in range(start, start + count)
    ]


class Graph:
    """Materialize one dataset definition on request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plane = ControlPlane()
        migrate(self.plane.database)
        self.instance = dg.DagsterInstance.ephemeral()

    def materialize(self, content: list[dict[str, Any]], **definition: Any) -> dg.ExecuteInProcessResult:
        (self.folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        described = DatasetDefinition.model_validate({"name": "doors", "source": "d.jsonl", **definition})
        assets = build_dataset_assets(described, self.folder)
        return dg.materialize(
            assets,
            selection=[dg.AssetKey(["datasets", "doors", step]) for step in ("version", *SPLITS)],
            instance=self.instance,
            resources={"control_plane": self.plane},
            raise_on_error=False,
        )

    def version(self, reference: str = "doors") -> DatasetVersion:
        return self.plane.datasets.read(reference, "default")

    def validation(self, reference: str = "doors") -> Validation:
        with self.plane.database.read() as connection:
            found = self.plane.validations.find(self.version(reference).id, connection)
        assert found is not None
        return found

    def verdict(self, check: str, reference: str = "doors") -> str:
        """Return the sentence of a failed check, or an empty string if it passed."""
        (found,) = [verdict for verdict in self.validation(reference).verdicts if verdict.check == check]
        return "" if found.passed else found.sentence

    def serve(self, version: DatasetVersion, stage: str) -> None:
        """Register a model trained on a version's splits and promote it to a stage."""
        weights = self.folder / "weights"
        weights.mkdir(exist_ok=True)
        inputs = {"train": version.split("train").digest}
        adapter = self.plane.store.publish(weights, "s3://hanzo-ml/runs/run/adapter", "adapter", inputs=inputs)
        with self.plane.database.write() as connection:
            record_artifact(connection, adapter, self.plane.store.manifest(adapter))
            made = self.plane.registry.register(connection, MODEL, registration("run"), {"gguf": adapter})
            self.plane.registry.add_artifacts(connection, made, {"gguf": adapter})
        self.plane.registry.promote(MODEL, 1, stage, user="ann")


def shown(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    """Return the metadata that Dagster shows for the version."""
    (materialized,) = result.asset_materializations_for_node(VERSION)
    return {name: entry.value for name, entry in materialized.metadata.items()}


VERSION = "datasets__doors__version"
