"""The assets `version` and `promotion` of the model registry."""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import ModelDefinition
from hanzo_ml_assets.failure_reason import reports_exit_reason
from hanzo_ml_assets.run_tags import asset_group_name
from resources.errors import HanzoError
from resources.registration.run_registration import register_job

# The version asset: register an evaluated model as a numbered version, in staging or quarantined.


def build_version(model: ModelDefinition, partitions: dg.DynamicPartitionsDefinition) -> dg.AssetsDefinition:
    @dg.asset(
        key=model.key("version"),
        deps=[model.key("evaluation")],
        partitions_def=partitions,
        group_name=asset_group_name("models", model.name),
        kinds={"sql"},
        owners=list(model.owners),
        description="A version in the registry: in staging if the gate accepted it, else quarantined with the reason.",
        code_version="1",
    )
    @reports_exit_reason
    def version(context: dg.AssetExecutionContext, control_plane: ControlPlane) -> dg.MaterializeResult:
        trained = control_plane.jobs.read(context.partition_key)
        try:
            name = model.registry_key(trained).name
            registered = register_job(control_plane.database, control_plane.store, name, trained)
        except HanzoError as error:
            raise dg.Failure(error.message) from None
        return dg.MaterializeResult(
            metadata={
                "version": registered.version,
                "stage": registered.stage,
                "status": registered.status,
                "reason": registered.reason or "none",
                "checkpoint_digest": trained.trained.digest,
            },
            data_version=dg.DataVersion(f"{registered.name}-{registered.version}"),
        )

    return version


# The promotion asset: the only step that needs a person. Materializing it does what the API and the command line do.
#
# A sensor reports promotions made there as materializations, so the graph shows every one.

PROMOTING_USER = "dagster"


def build_promotion(model: ModelDefinition, partitions: dg.DynamicPartitionsDefinition) -> dg.AssetsDefinition:
    @dg.asset(
        key=model.key("promotion"),
        deps=[model.key("version"), model.key("gguf")],
        partitions_def=partitions,
        group_name=asset_group_name("models", model.name),
        kinds={"human"},
        owners=list(model.owners),
        description="A person moves the version to production: by materializing this, by the API or by the command line.",
        code_version="1",
    )
    @reports_exit_reason
    def promotion(context: dg.AssetExecutionContext, control_plane: ControlPlane) -> dg.MaterializeResult:
        job = control_plane.jobs.read(context.partition_key)
        with control_plane.database.read() as connection:
            version = control_plane.registry.find_by_training(model.registry_key(job), job.id, connection)
        if version is None:
            raise dg.Failure(f"run {job.id} has no version yet: materialize its version first", allow_retries=False)
        try:
            promoted = control_plane.registry.promote(version.model, version.version, "production", user=PROMOTING_USER)
        except HanzoError as error:
            raise dg.Failure(error.message, allow_retries=False) from None
        return dg.MaterializeResult(metadata={"version": promoted.version, "user": PROMOTING_USER})

    return promotion
