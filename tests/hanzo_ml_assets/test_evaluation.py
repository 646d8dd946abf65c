"""The comparison baseline of a new model: the newest version accepted before it.

A repeated evaluation uses the same one.
"""

from pathlib import Path

import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import DeploymentTarget, ModelDefinition
from hanzo_ml_assets.evaluation import find_accepted_model
from hanzo_ml_assets.gate import GateVerdict
from recipes.storage.manifest import Artifact, Manifest
from resources.lineage.edges import record_artifact
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.registered_models import RegisteredModels
from resources.registration.run_registration import register_job
from tests.support.assets.dry_run_home import home

__all__ = ["home"]

MODEL = ModelDefinition(name="m", dataset="d", recipe="r", deployment=DeploymentTarget(smoke_prompts=("Hello?",)))


class ModelPipeline:
    def __init__(self, folder: Path) -> None:
        self.plane = ControlPlane()
        self.plane.store.put_bytes("s3://hanzo-models/base/b/config.json", b'{"architectures": ["LlamaForCausalLM"]}')
        self.base = Artifact(kind="base", uri="s3://hanzo-models/base/b", digest="b" * 64, size_bytes=1)

    def train(self, run: str) -> None:
        jobs = self.plane.jobs
        jobs.submit(name=run, config={"model": "m"}, user="u", organization="default", id=run, status="running")
        manifest = Manifest(kind="adapter", files=(), facts={"of": run})
        adapter = self.plane.store.put_manifest(f"s3://hanzo-ml/runs/{run}/adapter", manifest)
        with self.plane.database.write() as connection:
            record_artifact(connection, adapter, manifest)
            jobs.complete(connection, run, {"base": self.base, "adapter": adapter}, 1.0)

    def compared_with(self, run: str) -> str | None:
        """Return the run of the baseline model that this run is compared with."""
        found = find_accepted_model(MODEL, self.plane.jobs.read(run), self.plane)
        return None if found is None else found.uri.split("/")[-2]

    def evaluate(self, run: str, *, accepted: bool = True) -> None:
        """Record an evaluation as its asset does."""
        job = self.plane.jobs.read(run)
        before = find_accepted_model(MODEL, job, self.plane)
        inputs = {"adapter": job.trained.digest} | ({"accepted": before.digest} if before else {})
        report = Manifest(kind="evaluation", files=(), inputs=inputs)
        artifact = self.plane.store.put_manifest(f"s3://hanzo-ml/runs/{run}/evaluation", report)
        verdict = GateVerdict(accepted=accepted, reasons=() if accepted else ("worse",))
        scores = {"tuned": {"loss": 1.0, "perplexity": 2.7, "accuracy": 0.5}}
        judged = {"verdict": verdict.model_dump(mode="json"), "artifact": artifact.model_dump()}
        with self.plane.database.write() as connection:
            record_artifact(connection, artifact, report)
            self.plane.jobs.set_evaluation(connection, run, {"report": {"scores": scores}, **judged})

    def register(self, run: str) -> None:
        register_job(self.plane.database, self.plane.store, "m", self.plane.jobs.read(run))


@pytest.fixture
def pipeline(home: Path) -> ModelPipeline:
    return ModelPipeline(home)


def judged(pipeline: ModelPipeline, run: str, *, accepted: bool = True) -> None:
    pipeline.train(run)
    pipeline.evaluate(run, accepted=accepted)
    pipeline.register(run)


@pytest.mark.requirement("M3")
def test_accepted_version_awaiting_export_is_the_comparison_baseline(pipeline: ModelPipeline) -> None:
    """It passed its gate.

    Otherwise a worse model was accepted, because the export took a few minutes.
    """
    pipeline.train("a1")
    assert pipeline.compared_with("a1") is None
    judged(pipeline, "a2")
    assert pipeline.compared_with("a1") == "a2"
    judged(pipeline, "a3", accepted=False)
    assert pipeline.compared_with("a1") == "a2"


def test_repeated_evaluation_uses_the_same_comparison_baseline(pipeline: ModelPipeline) -> None:
    """A worker that died during the export repeats the evaluation.

    Against a version that was accepted since, the verdict differed from the one in the registry.
    """
    judged(pipeline, "a1")
    judged(pipeline, "a2")
    judged(pipeline, "a3")
    assert [pipeline.compared_with(run) for run in ("a1", "a2", "a3")] == [None, "a1", "a2"]


def test_run_of_a_renamed_model_keeps_its_version_and_comparison_baseline(pipeline: ModelPipeline) -> None:
    """Its export found no version, and repeated, it registered another under the old name."""
    judged(pipeline, "a1")
    judged(pipeline, "a2")
    old, new = ModelKey("default", "m"), ModelKey("default", "n")
    RegisteredModels(pipeline.plane.database).rename(old, new.name)
    judged(pipeline, "a3")
    pipeline.register("a2")
    assert pipeline.compared_with("a2") == "a1"
    with pipeline.plane.database.read() as connection:
        found = [pipeline.plane.registry.find_by_training(old, run, connection) for run in ("a1", "a2", "a3", "none")]
    assert [version and version.model for version in found] == [new, new, old, None]
