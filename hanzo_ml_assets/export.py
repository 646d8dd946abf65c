"""The assets `merged` and `gguf`: export a model version."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import dagster as dg
from pydantic import JsonValue
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import ModelDefinition
from hanzo_ml_assets.failure_reason import describe_exception, reports_exit_reason
from hanzo_ml_assets.run_tags import asset_group_name
from hanzo_ml_assets.supervisor import SUPERVISOR_HOOKS, run_program
from recipes.contracts.job import Job, Program
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, canonical_json
from resources.lineage.edges import find_artifact, record_artifact
from resources.lineage.run_record import read_record
from resources.metadata.jobs import JobRecord
from resources.metadata.registry.model_versions import ModelVersion

# Names of a version's exports, and which of them is served.
#
# The first export is named after its kind; later ones include the quantization. When the registry pointed to the newer
# export under the old name, the origin of the file in production could no longer be proved.


def name_formats(version: ModelVersion, made: Mapping[str, Artifact], quantization: str) -> dict[str, Artifact]:
    """Name exports: keep a version's existing name for equal bytes, else choose a new one."""
    there = {format: artifact.digest for format, artifact in version.own_artifacts.items()}

    def name(kind: str, digest: str) -> str:
        quantized = f"{kind}-{quantization.lower()}"
        of_these_bytes = f"{quantized}-{digest[:8]}"  # another release may compute other last bits
        names = (kind, quantized, of_these_bytes)
        return next(name for name in names if name not in version.artifacts or there.get(name) == digest)

    return {name(kind, artifact.digest): artifact for kind, artifact in made.items()}


def choose_served_export(version: ModelVersion, quantization: str) -> Artifact:
    """Return the export with this quantization, else the first. Raises without any."""
    return version.own_artifacts.get(f"gguf-{quantization.lower()}") or version.artifact("gguf")


EXPORT_KINDS = {"merged": "safetensors", "gguf": "gguf"}


def build_exports(model: ModelDefinition, partitions: dg.DynamicPartitionsDefinition) -> dg.AssetsDefinition:
    descriptions = {
        "merged": "The trained weights merged into one model, loaded again and checked for finite logits.",
        "gguf": f"The merged weights as {model.deployment.quantization}, the file that the engine serves.",
    }
    group = asset_group_name("models", model.name)

    @dg.multi_asset(
        name=f"export_{group}",
        specs=[
            dg.AssetSpec(
                model.key(step),
                deps=[model.key("version")] if step == "merged" else [model.key("merged")],
                group_name=group,
                kinds={kind},
                owners=list(model.owners),
                description=descriptions[step],
                code_version="1",
            )
            for step, kind in EXPORT_KINDS.items()
        ],
        partitions_def=partitions,
        hooks=SUPERVISOR_HOOKS,
    )
    @reports_exit_reason
    def exports(context: dg.AssetExecutionContext, control_plane: ControlPlane) -> Iterator[dg.MaterializeResult]:
        trained = control_plane.jobs.read(context.partition_key)
        with control_plane.database.read() as connection:
            version = control_plane.registry.find_by_training(model.registry_key(trained), trained.id, connection)
        if version is None:
            raise dg.Failure(f"run {trained.id} has no version yet: materialize its version first")
        with recorded_failure(control_plane, version):
            job = export_job(model, trained, version, control_plane)
            result = run_program(context, job, control_plane)
            with control_plane.database.read() as connection:
                made = reuse_recorded_exports(connection, version, result.artifacts, control_plane.store)
            with control_plane.database.write() as connection:
                register_exports(connection, control_plane, version, made, model.deployment.quantization)
        notes = result.facts.get("notes") or []
        for step, artifact in made.items():
            yield dg.MaterializeResult(
                asset_key=model.key(step),
                metadata={
                    "uri": artifact.uri,
                    "digest": artifact.digest,
                    "size_bytes": artifact.size_bytes,
                    "version": version.version,
                    **({"notes": notes} if notes and step == "gguf" else {}),
                },
                data_version=dg.DataVersion(artifact.digest),
            )

    return exports


@contextmanager
def recorded_failure(control_plane: ControlPlane, version: ModelVersion) -> Iterator[None]:
    """Mark the export as begun, and as failed with its reason if the body raises."""
    with control_plane.database.write() as connection:
        current = control_plane.registry.get(version.model, version.version, connection)
        control_plane.registry.begin_export(connection, current)
    try:
        yield
    except Exception as error:
        with suppress(SQLAlchemyError), control_plane.database.write() as connection:
            control_plane.registry.fail_export(connection, version, describe_exception(error))
        raise


def export_job(model: ModelDefinition, trained: JobRecord, version: ModelVersion, control_plane: ControlPlane) -> Job:
    """Return the job that exports a version.

    Registered files are never overwritten: an export with other inputs or parameters gets its own path.
    """
    record = read_record(control_plane.store, trained.artifact("run"))
    recipe = record.recipe
    quantization = model.deployment.quantization
    inputs = {role: trained.artifact(role) for role in (recipe.trained_role, "base")}
    parameters: dict[str, JsonValue] = {"recipe": recipe.model_dump(mode="json"), "quantization": quantization}
    arguments = read_template_arguments(trained, control_plane.store)
    if arguments:
        parameters["template_arguments"] = arguments
    if arguments or recipe.system_prompt is not None or has_named_templates(inputs["base"], control_plane.store):
        parameters["form"] = EXPORT_FORM  # exports of older releases differ and keep their path

    def job_at(folder_uri: str) -> Job:
        return Job(
            id=f"convert-{trained.id}",
            program=Program.CONVERT,
            inputs=inputs,
            parameters=parameters,
            outputs={"merged": f"{folder_uri}/safetensors", "gguf": f"{folder_uri}/gguf-{quantization.lower()}"},
            result_uri=f"{folder_uri}/convert.json",
            store=control_plane.settings.store,
            cache_dir=control_plane.cache_dir,
            hardware=model.export.resources or recipe.hardware,
            rendering=record.rendering,
            env=dict(trained.env),
            pod=trained.pod,
        )

    first = job_at(version_folder_uri(version))
    if EXPORT_KINDS.keys().isdisjoint(version.artifacts) or control_plane.compute.result(first) is not None:
        return first
    # An equal export exists, perhaps from another release, which may compute other last bits.
    asks = {"inputs": {role: artifact.digest for role, artifact in inputs.items()}, "parameters": parameters}
    return job_at(f"{version_folder_uri(version)}/export-{hashlib.sha256(canonical_json(asks)).hexdigest()[:12]}")


EXPORT_FORM = 2
"""Version 2: the served file includes the training's system prompt, template arguments and named templates."""


def read_template_arguments(trained: JobRecord, store: Store) -> dict[str, JsonValue]:
    """Return the chat template variables that a training's records were prepared with."""
    if "train" not in trained.artifacts:
        return {}
    prepared = store.manifest(trained.artifact("train")).facts.get("parameters")
    tokenize = prepared.get("tokenize") if isinstance(prepared, dict) else None
    arguments = tokenize.get("template_arguments") if isinstance(tokenize, dict) else None
    return dict(arguments) if isinstance(arguments, dict) else {}


def has_named_templates(base: Artifact, store: Store) -> bool:
    """Whether a base model has named chat templates, which old exports lack."""
    paths = {file.path for file in store.manifest(base).files}
    if any(path.startswith("additional_chat_templates/") for path in paths):
        return True
    if "tokenizer_config.json" not in paths:
        return False
    config = json.loads(store.get_bytes(f"{base.uri}/tokenizer_config.json"))
    return isinstance(config, dict) and isinstance(config.get("chat_template"), list | dict)


def reuse_recorded_exports(
    connection: Connection, version: ModelVersion, made: Mapping[str, Artifact], store: Store
) -> dict[str, Artifact]:
    """Replace new exports by recorded ones with equal bytes, and delete the copies."""
    found = {}
    for step, artifact in made.items():
        known = find_artifact(connection, artifact.digest)
        is_here = known is not None and known.uri.startswith(f"{version_folder_uri(version)}/")
        if known is None or not is_here or known.uri == artifact.uri or store.find(known.uri) != known:
            found[step] = artifact
        else:
            found[step] = known
            store.delete(artifact.uri)
    return found


def register_exports(
    connection: Connection,
    control_plane: ControlPlane,
    version: ModelVersion,
    made: Mapping[str, Artifact],
    quantization: str,
) -> None:
    """Record exports as formats of the version's current state."""
    for artifact in made.values():
        record_artifact(connection, artifact, control_plane.store.manifest(artifact))
    current = control_plane.registry.get(version.model, version.version, connection)
    control_plane.registry.add_artifacts(connection, current, name_formats(current, made, quantization))


def version_folder_uri(version: ModelVersion) -> str:
    return f"{version.model.folder_uri}/v{version.version}"
