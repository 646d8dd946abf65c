"""The asset `deployment`: verify, load and serve a promoted version, or roll back."""

from pathlib import Path

import dagster as dg
from sqlalchemy import Connection, select
from tenacity import Retrying, retry_if_exception_type

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import ModelDefinition
from hanzo_ml_assets.export import choose_served_export
from hanzo_ml_assets.failure_reason import reports_exit_reason
from hanzo_ml_assets.run_tags import asset_group_name
from recipes.storage.artifact_store import BrokenArtifact
from recipes.storage.manifest import Artifact, FileRecord
from recipes.storage.retry import every
from resources.errors import EngineError, EngineUnavailable
from resources.metadata.outbox import Event
from resources.metadata.registry import deployments, engine_replicas
from resources.metadata.registry.model_versions import ModelVersion
from resources.metadata.tables import events
from resources.serving.client import EngineClient
from resources.serving.replicated_engine import ReplicatedEngine, list_states

PROMOTED_EVENT = "model.promoted"
ENGINE_TIMEOUT_SECONDS = 60.0
"""How long an engine may be down: a restarting engine is no reason to reject a promotion."""


def build_deployment(model: ModelDefinition, partitions: dg.DynamicPartitionsDefinition) -> dg.AssetsDefinition:
    @dg.asset(
        key=model.key("deployment"),
        deps=[model.key("promotion")],
        partitions_def=partitions,
        group_name=asset_group_name("models", model.name),
        kinds={"llamacpp"},
        owners=list(model.owners),
        # One at a time: an older promotion never overtakes a newer one.
        pool=f"deploy_{asset_group_name('models', model.name)}",
        description="The version that the engine serves: checksum verified, smoke prompts answered, then traffic switched.",
        code_version="1",
    )
    @reports_exit_reason
    def deployment(context: dg.AssetExecutionContext, control_plane: ControlPlane) -> dg.MaterializeResult:
        with control_plane.database.read() as connection:
            job = control_plane.jobs.get(context.partition_key, connection)
            # Not by name: the model may have been renamed since its registration, and promoted under the new name.
            versions = control_plane.registry.list_by_run(job.organization, job.id, connection)
            promoted = [(version, find_last_promotion(connection, version)) for version in versions]
        wanted = next(((made, by) for made, by in promoted if by is not None and made.stage == "production"), None)
        if wanted is None:
            for promotion in [by for _, by in promoted if by is not None]:
                mark_superseded(promotion, control_plane)
            raise dg.Failure(f"no version of run {context.partition_key} is in production: promote one first")
        version, promotion = wanted
        served = deploy_version(model, version, promotion, control_plane)
        return dg.MaterializeResult(
            metadata={
                "version": version.version,
                "sha256": served.sha256,
                "url": dg.MetadataValue.url(served.url),
                **describe_replicas(served, control_plane),
                "export_digest": choose_served_export(version, model.deployment.quantization).digest,
            },
            data_version=dg.DataVersion(served.sha256),
        )

    return deployment


def describe_replicas(row: deployments.Deployment, control_plane: ControlPlane) -> dict[str, dg.MetadataValue]:
    """Return the state of a deployment in each replica; empty in push mode."""
    with control_plane.database.read() as connection:
        states = list_states(engine_replicas.list_live_replicas(connection), row.id)
    return {"replicas": dg.MetadataValue.json({each.replica: each.status for each in states})} if states else {}


def find_last_promotion(connection: Connection, version: ModelVersion) -> Event | None:
    """Return the event that last moved this version to production."""
    same = events.c.payload["organization"].as_string() == version.organization
    query = (
        select(events)
        .where(events.c.type == PROMOTED_EVENT, events.c.key == version.name, same)
        .order_by(events.c.seq.desc())
    )
    for row in connection.execute(query).mappings():
        if row["payload"]["version"] == version.version and row["payload"]["stage"] == "production":
            return Event(**row)
    return None


def find_gguf_file(export: Artifact, control_plane: ControlPlane) -> FileRecord:
    """Return the only GGUF file in an export's manifest."""
    files = control_plane.store.manifest(export).files
    return next(file for file in files if file.path.endswith(".gguf"))


def deploy_version(
    model: ModelDefinition, version: ModelVersion, promotion: Event, control_plane: ControlPlane
) -> deployments.Deployment:
    """Serve a version.

    Raises:
        dagster.Failure: checksum, smoke prompts or engine failed. The previous deployment keeps serving, this one is marked
            failed with the reason, and the registry is restored to the version being served.
    """
    export = choose_served_export(version, model.deployment.quantization)
    sha256 = next((file.sha256 for file in list_gguf_files(export, control_plane)), "")
    with control_plane.database.write() as connection:
        row = deployments.begin_deployment(
            connection,
            version.model,
            version=version.version,
            promotion=promotion.seq,
            url=control_plane.settings.engine_url,
            sha256=sha256,
        )
        attempt = record_pulled_file(connection, model, row, export, control_plane)
    try:
        file = find_gguf_file(export, control_plane)
        engine = control_plane.engine
        if isinstance(engine, ReplicatedEngine):
            engine.await_serving(row, attempt)
        else:
            folder = control_plane.store.fetch(export, control_plane.settings.home / "cache")
            load_in_engine(model, version, row, folder / file.path, file.sha256, engine)
    except (EngineError, BrokenArtifact) as error:
        if row.reason and isinstance(error, EngineUnavailable):  # a redeployment: the version worked before
            raise dg.Failure(f"{version.reference} is not served, which is tried again: {error}") from None
        with control_plane.database.write() as connection:
            deployments.mark_failed(connection, row, str(error))
            # Not the version that this promotion replaced, which may never have been served.
            served = deployments.find_serving(connection, version.model)
            previous = served.version if served else None
            control_plane.registry.restore(connection, version, previous, str(error))
        raise dg.Failure(f"{version.reference} is not deployed: {error}", allow_retries=False) from None
    with control_plane.database.write() as connection:
        serves = deployments.mark_serving(connection, row)
    if not serves:
        raise dg.Failure(f"{version.reference} was taken out of service while it was deployed", allow_retries=False)
    return row


def record_pulled_file(
    connection: Connection,
    model: ModelDefinition,
    row: deployments.Deployment,
    export: Artifact,
    control_plane: ControlPlane,
) -> int:
    """Make replicas serve a deployment. Returns the attempt's number, 0 in push mode."""
    if control_plane.settings.engine.mode != "pull":
        return 0
    attempt = 0
    for file in list_gguf_files(export, control_plane):
        attempt = engine_replicas.record_file(
            connection,
            row,
            uri=f"{export.uri}/{file.object_path}",
            size_bytes=file.size,
            smoke_prompts=model.deployment.smoke_prompts,
        )
    return attempt


def load_in_engine(
    model: ModelDefinition,
    version: ModelVersion,
    row: deployments.Deployment,
    path: Path,
    sha256: str,
    engine: EngineClient,
) -> None:
    """Make the engine serve a file, waiting until it is reachable.

    Raises:
        EngineError: the engine rejected it, or was unreachable for ENGINE_TIMEOUT_SECONDS.
    """
    Retrying(retry=retry_if_exception_type(EngineUnavailable), **every(1.0, ENGINE_TIMEOUT_SECONDS))(
        engine.deploy,
        name=version.model.served_name,
        version=version.version,
        deployment=row.id,
        path=path,
        sha256=sha256,
        smoke_prompts=list(model.deployment.smoke_prompts),
    )


def mark_superseded(promotion: Event, control_plane: ControlPlane) -> None:
    """Mark a deployment as overtaken.

    A worker that died while deploying may have left its row in progress, or the engine serving a withdrawn version.
    """
    with control_plane.database.write() as connection:
        row = deployments.find_by_promotion(connection, promotion.seq)
        if row is not None:
            deployments.mark_overtaken(connection, row)


def list_gguf_files(export: Artifact, control_plane: ControlPlane) -> list[FileRecord]:
    """Return the GGUF file of an export; none for a broken manifest, which loading reports."""
    try:
        return [find_gguf_file(export, control_plane)]
    except (BrokenArtifact, StopIteration):
        return []
