"""The version asset: what was evaluated becomes a numbered version of the registry, in staging or quarantined."""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import ModelDefinition
from hanzo_ml_assets.failure_reason import reports_exit_reason
from hanzo_ml_assets.run_tags import group_name
from resources.errors import HanzoError
from resources.registration.run_registration import register_job


def build_version(model: ModelDefinition, partitions: dg.DynamicPartitionsDefinition) -> dg.AssetsDefinition:
    @dg.asset(
        key=model.key("version"),
        deps=[model.key("evaluation")],
        partitions_def=partitions,
        group_name=group_name("models", model.name),
        kinds={"sql"},
        owners=list(model.owners),
        description="A version of the registry: staging when the gate accepted it, else quarantined with the reason.",
        code_version="1",
    )
    @reports_exit_reason
    def version(context: dg.AssetExecutionContext, control_plane: ControlPlane) -> dg.MaterializeResult:
        trained = control_plane.jobs.read(context.partition_key)
        try:
            name = model.registered(trained).name
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
