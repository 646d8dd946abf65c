"""Stop serving models that were taken out of production.

It reads rows, not events: after any interruption, `list_withdrawing` returns a deployment until the engine has confirmed its
removal.
"""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from resources.errors import EngineError, UnknownModel
from resources.metadata.registry.deployments import list_withdrawing, mark_withdrawn
from sensors.sensor import SLOW_INTERVAL_SECONDS, sensor


@sensor(interval=SLOW_INTERVAL_SECONDS, description="Stops serving versions that left production.", requests_runs=False)
def withdraw_deployments(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    with control_plane.database.read() as connection:
        leaving = list_withdrawing(connection)
    withdrawn_models = []
    for deployment in leaving:
        reference = f"{deployment.name} version {deployment.version}"
        try:
            control_plane.engine.remove(deployment.model.served_name, deployment.id)
        except UnknownModel:
            pass  # gone, replaced, or only about to be loaded: then the deployment withdraws itself
        except EngineError as error:
            # A gateway that is down would serve the version again after its restart.
            context.log.warning(f"cannot stop serving {reference} yet: {error}")
            continue
        with control_plane.database.write() as connection:
            mark_withdrawn(connection, deployment)
        withdrawn_models.append(reference)
    return dg.SensorResult(
        skip_reason=f"stopped serving: {', '.join(withdrawn_models)}" if withdrawn_models else "nothing leaves production"
    )
