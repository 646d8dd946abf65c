"""The promotion asset: the one step that a person takes. A click on it does what the API and the command line do.

What is promoted there is reported here by the sensor, so that the graph shows every promotion, whoever made it.
"""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import ModelDefinition
from hanzo_ml_assets.failure_reason import reports_exit_reason
from hanzo_ml_assets.run_tags import group_name
from resources.errors import HanzoError

USER = "dagster"


def build_promotion(model: ModelDefinition, partitions: dg.DynamicPartitionsDefinition) -> dg.AssetsDefinition:
    @dg.asset(
        key=model.key("promotion"),
        deps=[model.key("version"), model.key("gguf")],
        partitions_def=partitions,
        group_name=group_name("models", model.name),
        kinds={"human"},
        owners=list(model.owners),
        description="Somebody moves the version to production: here by a click, or by the API or the command line.",
        code_version="1",
    )
    @reports_exit_reason
    def promotion(context: dg.AssetExecutionContext, control_plane: ControlPlane) -> dg.MaterializeResult:
        job = control_plane.jobs.read(context.partition_key)
        with control_plane.database.read() as connection:
            version = control_plane.registry.of_training(model.registered(job), job.id, connection)
        if version is None:
            raise dg.Failure(f"run {job.id} has no version yet: materialize its version first", allow_retries=False)
        try:
            promoted = control_plane.registry.promote(version.model, version.version, "production", user=USER)
        except HanzoError as error:
            raise dg.Failure(error.message, allow_retries=False) from None
        return dg.MaterializeResult(metadata={"version": promoted.version, "user": USER})

    return promotion
