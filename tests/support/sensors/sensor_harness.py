"""A control plane with a Dagster instance, for sensors."""

import os
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definitions import definitions
from recipes.contracts.validation_results import Leaks, ValidationFacts, Violations
from recipes.storage.manifest import Artifact
from resources.datasets.check_policy import Check
from resources.datasets.check_verdicts import Verdict
from resources.ingest.version_creation import create_version
from resources.metadata.datasets import DatasetVersion
from resources.metadata.registry import deployments
from resources.metadata.registry.version_lifecycle import ModelVersion
from sensors import retry_dead_runs as dead_runs
from sensors.decisions.retry_policy import FAILURE_REASON_TAG
from sensors.sensor import Sensor
from tests.support.migrated_database import migrate
from tests.support.resources.model_versions import artifact, registration
from tests.support.resources.model_versions import model as model_key

MODEL, DATASET = "ellarin-assistant", "ellarin"

STATISTICS = Artifact(kind="statistics", uri="s3://hanzo-ml/datasets/d/1/x", digest="d" * 64, size_bytes=9)

SPLIT = Artifact(kind="split", uri="s3://hanzo-ml/datasets/d/1/splits/x/train", digest="c" * 64, size_bytes=1)


@cache
def loaded() -> dg.RepositoryDefinition:
    """Load the definitions once for all importing files.

    It takes a second, and no test changes them.
    """
    return definitions().get_repository_def()


@pytest.fixture(scope="module")
def repository() -> dg.RepositoryDefinition:
    return loaded()


class SensorHarness:
    def __init__(self, folder: Path, repository: dg.RepositoryDefinition) -> None:
        self.plane = ControlPlane()
        migrate(self.plane.database)
        self.folder = folder
        self.repository = repository
        self.instance = dg.DagsterInstance.ephemeral()
        self.cursors: dict[str, str | None] = {}

    def tick(self, sensor: Sensor) -> list[dg.RunRequest]:
        """Evaluate a sensor once, from the cursor of its last evaluation."""
        context = dg.build_sensor_context(
            instance=self.instance,
            cursor=self.cursors.get(sensor.name),
            repository_def=self.repository,
        )
        result = sensor.on(self.plane)(context)
        assert isinstance(result, dg.SensorResult)
        self.cursors[sensor.name] = result.cursor
        self.asset_events = list(result.asset_events)
        return list(result.run_requests or [])

    def reset(self) -> None:
        self.cursors = {}

    def dataset(self, name: str = DATASET, *, split: bool = True, text: str = "") -> DatasetVersion:
        raw = self.folder / f"{name}.jsonl"
        raw.write_text(f'{{"instruction": "Who{text}?", "answer": "She."}}\n')
        version, _ = create_version(
            self.plane.database, self.plane.store, name=name, path=raw, user="u", organization="default"
        )
        if split:
            self.split(version)
        return version

    def split(self, version: DatasetVersion) -> None:
        with self.plane.database.write() as connection:
            stored = {name: {"artifact": SPLIT.model_dump()} for name in ("train", "validation", "test")}
            self.plane.datasets.set_splits(connection, version, stored)
        self.judge(version)

    def judge(self, version: DatasetVersion, *, passed: bool = True) -> None:
        """Record a version's validation: its contract check passed or not, and no leakage."""
        contract = Verdict(
            check=Check.CONTRACT,
            passed=passed,
            severity="error",
            blocking=True,
            reasons=() if passed else ("line 3, answer must be string",),
        )
        leakage = Verdict(check=Check.LEAKAGE, passed=True, severity="warn", blocking=False)
        with self.plane.database.write() as connection:
            facts = ValidationFacts(violations=Violations())
            self.plane.validations.set_version(connection, version, STATISTICS, facts, [contract])
            if passed:
                self.plane.validations.set_leaks(connection, version, Leaks(tested=1, searched=1, exact=0, near=0), leakage)

    def submit(self, id: str, model: str = MODEL, **config: Any) -> str:
        self.plane.jobs.submit(
            name=config.pop("name", model), config={"model": model, **config}, user="u", organization="default", id=id
        )
        return id

    def complete(self, id: str) -> None:
        self.plane.jobs.start(id)
        with self.plane.database.write() as connection:
            self.plane.jobs.complete(connection, id, {}, 1.0)

    def register(self, run: str, name: str = MODEL, *, exported: bool = True) -> ModelVersion:
        with self.plane.database.write() as connection:
            version = self.plane.registry.register(connection, model_key(name), registration(run), {})
            if exported:
                self.plane.registry.add_artifacts(connection, version, {"gguf": artifact("gguf", version.version)})
            return version

    def promote(self, number: int, name: str = MODEL, stage: str = "production") -> int:
        self.plane.registry.promote(model_key(name), number, stage, user="ann")
        with self.plane.database.read() as connection:
            return int(connection.exec_driver_sql("SELECT max(seq) FROM events").scalar() or 0)

    def begin_deployment(self, number: int, promotion: int, status: str) -> None:
        with self.plane.database.write() as connection:
            row = deployments.begin_deployment(
                connection, model_key(MODEL), version=number, promotion=promotion, url="u", sha256="0" * 64
            )
            if status == "serving":
                deployments.mark_serving(connection, row)
            elif status == "failed":
                deployments.mark_failed(connection, row, "no answer")


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: dg.RepositoryDefinition) -> Iterator[SensorHarness]:
    for name in [name for name in os.environ if name.startswith("HANZO_ML_") and not name.endswith("_PORT")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(
        dead_runs, "SETTLING_TIME", timedelta(0)
    )  # saves a second per test; `test_data_retries` tests the waiting
    harness = SensorHarness(tmp_path, repository)
    with harness.instance:
        yield harness
    harness.plane.database.close()


def keys(request: dg.RunRequest) -> list[str]:
    return [key.to_user_string() for key in request.asset_selection or []]


def failed_run(
    harness: SensorHarness,
    steps: tuple[str, ...],
    partition: str,
    status: dg.DagsterRunStatus = dg.DagsterRunStatus.FAILURE,
    **tags: str,
) -> str:
    """Create a run that failed by its own error, after Dagster has set its tags."""
    job = harness.repository.get_implicit_job_def_for_assets([dg.AssetKey(["models", MODEL, step]) for step in steps])
    assert job is not None
    run = harness.instance.create_run_for_job(
        job,
        asset_selection=frozenset(dg.AssetKey(["models", MODEL, step]) for step in steps),
        tags={"dagster/partition": partition, FAILURE_REASON_TAG: "STEP_FAILURE", **tags},
        status=status,
    )
    return str(run.run_id)
