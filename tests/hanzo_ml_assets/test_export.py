"""Repeated exports of a version: registered artifacts are never changed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import DeploymentTarget, EvaluationSuite, Export, ModelDefinition
from hanzo_ml_assets.evaluation import evaluation_job
from hanzo_ml_assets.export import (
    choose_served_export,
    export_job,
    recorded_failure,
    register_exports,
    reuse_recorded_exports,
)
from recipes.contracts.job import BadConfiguration, Hardware, Job, Result
from recipes.contracts.pod_settings import PodSettings
from recipes.contracts.recipe import Recipe
from recipes.storage.manifest import Artifact
from resources.errors import HanzoError
from resources.lineage.run_record import Environment, RunRecord, write_record
from resources.metadata.jobs import JobRecord
from resources.metadata.registry.version_lifecycle import ModelVersion
from tests.support.assets.control_plane import isolated_plane
from tests.support.resources.model_versions import model, registration

RUN = "r1"


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    with isolated_plane(tmp_path / "home", monkeypatch) as plane:
        environment = Environment(git_commit="0" * 40, git_dirty=False, lock_sha256="0" * 64, python="3")
        ran = RunRecord(
            run_id=RUN, model="m", dataset="d@1", recipe=Recipe.named("smollm2-135m-lora"), seed=1, environment=environment
        )
        plane.jobs.submit(name="m", config={"model": "m"}, user="u", organization="default", id=RUN)
        plane.jobs.start(RUN)
        trained = {
            "run": write_record(plane.store, ran, {}),
            "adapter": published(plane, tmp_path / "adapter", f"s3://hanzo-ml/runs/{RUN}/adapter", "adapter"),
            "base": published(plane, tmp_path / "base", "s3://hanzo-models/base/b", "base"),
        }
        with plane.database.write() as connection:
            plane.jobs.complete(connection, RUN, trained, 1.0)
            plane.registry.register(connection, model(), registration(RUN), {"adapter": trained["adapter"]})
        yield plane


def published(plane: ControlPlane, folder: Path, uri: str, text: str) -> Artifact:
    folder.mkdir()
    (folder / "model").write_text(text)
    return plane.store.publish(folder, uri, "merged")


def version(plane: ControlPlane) -> ModelVersion:
    with plane.database.read() as connection:
        return plane.registry.get(model(), 1, connection)


def wanted(plane: ControlPlane, trained: JobRecord | None = None, **changed: Any) -> Job:
    target = DeploymentTarget(smoke_prompts=("Who?",), **changed)
    definition = ModelDefinition(name="m", dataset="d", recipe="smollm2-135m-lora", deployment=target)
    return export_job(definition, trained or plane.jobs.read(RUN), version(plane), plane)


def export(plane: ControlPlane, folder: Path, job: Job, text: str) -> dict[str, Artifact]:
    """Store what the program leaves: its artifacts and its result."""
    folder.mkdir()
    made = {role: published(plane, folder / role, uri, f"{text} of {role}") for role, uri in job.outputs.items()}
    result = Result(work_digest=job.work_digest, artifacts=made)
    plane.store.put_bytes(job.result_uri, result.model_dump_json().encode())
    return made


def register(plane: ControlPlane, made: dict[str, Artifact], quantization: str = "Q8_0") -> None:
    with plane.database.write() as connection:
        register_exports(connection, plane, version(plane), made, quantization)


def test_changed_export_gets_a_new_location_and_an_equal_one_is_reused(plane: ControlPlane, tmp_path: Path) -> None:
    """Its merged weights overwrote those that the model in production is proved by."""
    first = wanted(plane)
    assert first.outputs["merged"] == "s3://hanzo-models/m/v1/safetensors", "as the specification has it"
    register(plane, export(plane, tmp_path / "first", first, "weights"))
    assert wanted(plane) == first, "whose result is there"
    other = wanted(plane, quantization="F16")
    assert set(other.outputs.values()).isdisjoint(first.outputs.values()) and other.result_uri != first.result_uri
    register(plane, export(plane, tmp_path / "other", other, "other weights"), "F16")
    assert wanted(plane, quantization="F16") == other
    assert plane.store.get_bytes(f"{first.outputs['merged']}/model") == b"weights of merged"


def test_other_quantization_adds_a_format_and_keeps_registered_artifacts(plane: ControlPlane, tmp_path: Path) -> None:
    """The registry pointed to it instead: the engine served none of the version's files."""
    first = export(plane, tmp_path / "first", wanted(plane), "weights")
    register(plane, first)
    before = version(plane)
    other = export(plane, tmp_path / "other", wanted(plane, quantization="F16"), "other weights")
    other["merged"] = first["merged"]
    for _ in range(2):
        register(plane, other, "F16")
    after = version(plane)
    assert {format: after.artifacts[format] for format in before.artifacts} == before.artifacts
    assert after.artifacts.keys() - before.artifacts.keys() == {"gguf-f16"}
    assert choose_served_export(after, "F16") == other["gguf"] and choose_served_export(after, "Q8_0") == first["gguf"]
    again = export(plane, tmp_path / "again", wanted(plane, quantization="BF16"), "of another release")
    register(plane, again, "F16")
    named = f"gguf-f16-{again['gguf'].digest[:8]}"
    assert version(plane).artifact(named) == again["gguf"] and choose_served_export(version(plane), "F16") == other["gguf"]
    with (
        plane.database.write() as connection,
        pytest.raises(HanzoError, match="m version 1 already has a gguf with other content"),
    ):
        plane.registry.add_artifacts(connection, version(plane), {"gguf": other["gguf"]})


def test_equal_export_with_missing_result_gets_a_new_location(plane: ControlPlane, tmp_path: Path) -> None:
    first = wanted(plane)
    register(plane, export(plane, tmp_path / "first", first, "weights"))
    plane.store.remove(first.result_uri)
    assert wanted(plane).outputs["merged"].startswith("s3://hanzo-models/m/v1/export-")


def test_killed_export_resumes_at_the_same_location(plane: ControlPlane, tmp_path: Path) -> None:
    """Nothing of it is registered before it ends."""
    first = wanted(plane)
    published(plane, tmp_path / "merged", first.outputs["merged"], "weights")
    assert wanted(plane) == first


def test_duplicate_export_of_equal_bytes_is_removed_and_the_recorded_one_kept(plane: ControlPlane, tmp_path: Path) -> None:
    """Also when another export was registered in between: lineage stores an artifact once."""
    first = export(plane, tmp_path / "first", wanted(plane), "weights")
    register(plane, first)
    register(plane, export(plane, tmp_path / "other", wanted(plane, quantization="F16"), "other weights"), "F16")
    third = wanted(plane, quantization="BF16")
    made = export(plane, tmp_path / "third", third, "weights")
    with plane.database.read() as connection:
        assert reuse_recorded_exports(connection, version(plane), made, plane.store) == first
        assert reuse_recorded_exports(connection, version(plane), first, plane.store) == first
    assert plane.store.list(third.outputs["merged"]) == []
    assert plane.store.get_bytes(f"{first['merged'].uri}/model") == b"weights of merged"
    new = {"gguf": published(plane, tmp_path / "gguf", third.outputs["gguf"], "new")}
    with plane.database.read() as connection:
        assert reuse_recorded_exports(connection, version(plane), new, plane.store) == new
    plane.store.delete(first["merged"].uri)
    again = {"merged": published(plane, tmp_path / "again", third.outputs["merged"], "weights of merged")}
    with plane.database.read() as connection:
        assert reuse_recorded_exports(connection, version(plane), again, plane.store) == again, (
            "what is recorded is not there"
        )


@pytest.mark.requirement("A9", "M7")
def test_export_and_evaluation_use_their_own_resources_and_the_jobs_pod_settings(plane: ControlPlane) -> None:
    pod = PodSettings(image_pull_secrets=("registry",))
    job = replace(plane.jobs.read(RUN), config={"model": "m", "env": {"A": "b"}, "pod": pod.model_dump(mode="json")})
    job = replace(job, artifacts={**job.artifacts, "test": job.artifacts["base"]})
    target = DeploymentTarget(smoke_prompts=("Who?",))
    usual = ModelDefinition(name="m", dataset="d", recipe="smollm2-135m-lora", deployment=target)
    small = usual.model_copy(
        update={
            "evaluation": EvaluationSuite(resources=Hardware(gpus=1, memory="32Gi")),
            "export": Export(resources=Hardware(cpu=16, memory="64Gi")),
        }
    )
    recipe = Recipe.named("smollm2-135m-lora")
    for definition, evaluated_on, exported_on in (
        (usual, recipe.hardware, recipe.hardware),
        (small, small.evaluation.resources, small.export.resources),
    ):
        evaluation = evaluation_job(definition, job, plane)
        exported = export_job(definition, job, version(plane), plane)
        assert (evaluation.hardware, exported.hardware) == (evaluated_on, exported_on)
        assert evaluation.pod == exported.pod == pod and evaluation.env == {"A": "b"}
        assert evaluation.work_digest == evaluation_job(usual, job, plane).work_digest, "where it runs is no part of it"


def test_failed_export_is_recorded_on_the_version_until_the_next_attempt(plane: ControlPlane) -> None:
    def attempt(error: Exception | None) -> None:
        with recorded_failure(plane, version(plane)):
            assert (version(plane).status, version(plane).reason) == ("pending", "")
            if error:
                raise error

    error = BadConfiguration("the engine renders it differently")
    for _ in range(2):
        with pytest.raises(BadConfiguration):
            attempt(error)
        assert (version(plane).status, version(plane).reason) == ("failed", str(error))
    attempt(None)
    assert version(plane).status == "pending"


def training_with(plane: ControlPlane, **artifacts: Artifact) -> JobRecord:
    job = plane.jobs.read(RUN)
    return replace(job, artifacts={**job.artifacts, **{name: each.model_dump() for name, each in artifacts.items()}})


def test_template_arguments_of_the_training_are_exported_to_a_new_location(plane: ControlPlane, tmp_path: Path) -> None:
    """An export of an older release, which lacked them, is unchanged."""
    before = wanted(plane)
    assert before.parameters.keys() == {"recipe", "quantization"}, "equal work keeps its digest"
    register(plane, export(plane, tmp_path / "first", before, "weights"))
    (tmp_path / "train").mkdir()
    arguments = {"date_string": "26 Jul 2024"}
    facts = {"parameters": {"tokenize": {"tokenizer": "x", "template_arguments": arguments}}}
    train = plane.store.publish(tmp_path / "train", "s3://hanzo-ml/datasets/d/1/train", "split", facts=facts)
    after = wanted(plane, training_with(plane, train=train))
    assert after.parameters["template_arguments"] == arguments
    assert set(after.outputs.values()).isdisjoint(before.outputs.values()) and after.result_uri != before.result_uri


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "x"}]}'},
        {"tokenizer_config.json": "{}", "additional_chat_templates/rag.jinja": "x"},
    ],
)
def test_named_templates_are_exported_to_another_place(plane: ControlPlane, tmp_path: Path, files: dict[str, str]) -> None:
    before = wanted(plane)
    for name, text in files.items():
        (tmp_path / "named" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "named" / name).write_text(text)
    base = plane.store.publish(tmp_path / "named", "s3://hanzo-models/base/named", "base")
    assert wanted(plane, training_with(plane, base=base)).parameters["form"] == 2 and "form" not in before.parameters
