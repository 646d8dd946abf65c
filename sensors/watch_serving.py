"""The engine does not serve what was deployed -> tell so, and have it deployed again (specification rows P6, X7).

An engine that lost its state knows nothing of it; one that was killed as it swapped serves what nobody recorded; one that
is started anew refuses a file that is no more what it was, and only its own log would say so.
"""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from resources.engine.errors import EngineError
from resources.engine.types import Served
from resources.metadata.registry.deployments import Deployment, in_production, lost
from sensors.event_cursor import SELDOM_SECONDS
from sensors.sensor import sensor


@sensor(interval=SELDOM_SECONDS, description="Tells what the engine does not serve as it was deployed.", requests_runs=False)
def watch_serving(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    with control_plane.database.read() as connection:
        recorded = in_production(connection)
    if not recorded:
        return dg.SensorResult(skip_reason="nothing is served")
    try:
        found = {served.name: served for served in control_plane.engine.served()}
    except EngineError as error:  # one that is away serves it again as it comes back
        return dg.SensorResult(skip_reason=f"the engine does not say what it serves: {error}")
    for deployment in recorded:
        difference = difference_of(deployment, found.get(deployment.model.served_name))
        if difference is None:
            continue
        # What was promoted, replaced or withdrawn since is not lost: that is looked at once more, and not by two at once.
        with control_plane.database.write() as connection:
            if lost(connection, deployment, difference):
                context.log.warning(f"{deployment.name} version {deployment.version} is to be deployed again: {difference}")
    return dg.SensorResult(skip_reason=f"{len(recorded)} models are served")


def difference_of(deployment: Deployment, served: Served | None) -> str | None:
    """In what the engine differs from the record, as one line; None where it does not."""
    if served is None:
        return "the engine does not know it"
    if (served.version, served.sha256) != (deployment.version, deployment.sha256):
        return f"the engine has version {served.version} with SHA-256 {served.sha256}"
    if served.status == "refused":
        return f"the engine refuses it: {served.reason}"
    return None
