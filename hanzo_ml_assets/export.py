"""The assets `merged` and `gguf`: export a model version."""

import hashlib
from collections.abc import Iterator, Mapping

import dagster as dg
from pydantic import JsonValue
from sqlalchemy import Connection

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import ModelDefinition
from hanzo_ml_assets.failure_reason import reports_exit_reason
from hanzo_ml_assets.run_tags import asset_group_name
from hanzo_ml_assets.supervisor import SUPERVISOR_HOOKS, run_program
from recipes.contracts.job import Job, Program
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, canonical_json
from resources.lineage.edges import find_artifact, record_artifact
from resources.lineage.run_record import read_record
from resources.metadata.jobs import JobRecord
from resources.metadata.registry.model_versions import ModelVersion

# Under which formats a version has its exports, and which of them is served.
#
# The first has the names of its kinds. Another of the version has its quantization in its names: the registry pointed to
# it instead, and of the file in production nobody could prove any more what it was.


def name_formats(version: ModelVersion, made: Mapping[str, Artifact], quantization: str) -> dict[str, Artifact]:
    """What was made, by the names under which a version is to have it: what it has for these bytes, else new ones."""
    there = {format: artifact.digest for format, artifact in version.own_artifacts.items()}

    def name(kind: str, digest: str) -> str:
        quantized = f"{kind}-{quantization.lower()}"
        of_these_bytes = f"{quantized}-{digest[:8]}"  # another release may compute the last bits otherwise
        names = (kind, quantized, of_these_bytes)
        return next(name for name in names if name not in version.artifacts or there.get(name) == digest)

    return {name(kind, artifact.digest): artifact for kind, artifact in made.items()}


def choose_served_export(version: ModelVersion, quantization: str) -> Artifact:
    """The export of a version in a quantization where it has one by that name, else its first. Raises where it has none."""
    return version.own_artifacts.get(f"gguf-{quantization.lower()}") or version.artifact("gguf")


EXPORT_KINDS = {"merged": "safetensors", "gguf": "gguf"}


def build_exports(model: ModelDefinition, partitions: dg.DynamicPartitionsDefinition) -> dg.AssetsDefinition:
    descriptions = {
        "merged": "What was trained as one set of weights; loaded again and seen to give finite logits.",
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
        job = export_job(model, trained, version, control_plane)
        result = run_program(context, job, control_plane)
        with control_plane.database.read() as connection:
            made = reuse_recorded_exports(connection, version, result.artifacts, control_plane.store)
        with control_plane.database.write() as connection:
            register_exports(connection, control_plane, version, made, model.deployment.quantization)
        for step, artifact in made.items():
            yield dg.MaterializeResult(
                asset_key=model.key(step),
                metadata={
                    "uri": artifact.uri,
                    "digest": artifact.digest,
                    "size_bytes": artifact.size_bytes,
                    "version": version.version,
                },
                data_version=dg.DataVersion(artifact.digest),
            )

    return exports


def export_job(model: ModelDefinition, trained: JobRecord, version: ModelVersion, control_plane: ControlPlane) -> Job:
    """The job that exports a version. What is registered never changes: other work than made it goes to another place."""
    recipe = read_record(control_plane.store, trained.artifact("run")).recipe
    quantization = model.deployment.quantization
    inputs = {role: trained.artifact(role) for role in (recipe.trained_role, "base")}
    parameters: dict[str, JsonValue] = {"recipe": recipe.model_dump(mode="json"), "quantization": quantization}

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
            env=dict(trained.env),
            pod=trained.pod,
        )

    first = job_at(version_folder_uri(version))
    if EXPORT_KINDS.keys().isdisjoint(version.artifacts) or control_plane.compute.result(first) is not None:
        return first
    # An equal export is done; this one is of another release, perhaps, which computes the last bits otherwise.
    asks = {"inputs": {role: artifact.digest for role, artifact in inputs.items()}, "parameters": parameters}
    return job_at(f"{version_folder_uri(version)}/export-{hashlib.sha256(canonical_json(asks)).hexdigest()[:12]}")


def reuse_recorded_exports(
    connection: Connection, version: ModelVersion, made: Mapping[str, Artifact], store: Store
) -> dict[str, Artifact]:
    """What was made, or instead of it what is recorded of this version and equals it byte for byte: then the copy goes."""
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
    """Record what was made as formats of the version as it is now."""
    for artifact in made.values():
        record_artifact(connection, artifact, control_plane.store.manifest(artifact))
    current = control_plane.registry.get(version.model, version.version, connection)
    control_plane.registry.add_artifacts(connection, current, name_formats(current, made, quantization))


def version_folder_uri(version: ModelVersion) -> str:
    return f"{version.model.folder_uri}/v{version.version}"
