"""A model was taken out of production -> the engine serves it no more (specification rows O3, O5).

It follows the rows and not the events: whatever was killed in between, a row says `list_withdrawing` until the engine was
seen to have let go of exactly that deployment.
"""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from resources.errors import EngineError, UnknownModel
from resources.metadata.registry.deployments import list_withdrawing, mark_withdrawn
from sensors.sensor import SLOW_INTERVAL_SECONDS, sensor


@sensor(interval=SLOW_INTERVAL_SECONDS, description="Takes what left production out of service.", requests_runs=False)
def withdraw_deployments(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    with control_plane.database.read() as connection:
        leaving = list_withdrawing(connection)
    withdrawn_models = []
    for deployment in leaving:
        reference = f"{deployment.name} version {deployment.version}"
        try:
            control_plane.engine.remove(deployment.model.served_name, deployment.id)
        except UnknownModel:
            pass  # it is gone, was replaced, or is only about to be loaded: then the deployment takes itself back
        except EngineError as error:
            # A gateway that is away would serve it again as it comes back.
            context.log.warning(f"{reference} is still to be taken out of service: {error}")
            continue
        with control_plane.database.write() as connection:
            mark_withdrawn(connection, deployment)
        withdrawn_models.append(reference)
    return dg.SensorResult(
        skip_reason=f"taken out of service: {', '.join(withdrawn_models)}"
        if withdrawn_models
        else "nothing leaves production"
    )
