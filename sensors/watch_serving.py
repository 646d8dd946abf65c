"""The engine does not serve what was deployed -> tell so, and have it deployed again (specification rows P6, X7).

An engine that lost its state knows nothing of it; one that was killed as it swapped serves what nobody recorded; one that
is started anew refuses a file that is no more what it was, and only its own log would say so. What was to be deployed again
while the engine was away, and was given up, is told of once more as soon as the engine is back.
"""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.contracts.quantities import pluralize
from resources.errors import EngineError
from resources.metadata.registry.deployments import Deployment, list_in_production, list_restoring, mark_lost, mark_restored
from resources.serving.client import Served
from sensors.decisions.job_runs import PARTITION_TAG
from sensors.decisions.retry_policy import MAX_RETRIES, count_retries, selected_steps
from sensors.retry_dead_runs import DEPLOYMENT_STEP
from sensors.sensor import SLOW_INTERVAL_SECONDS, sensor


@sensor(
    interval=SLOW_INTERVAL_SECONDS,
    description="Tells what the engine does not serve as it was deployed.",
    requests_runs=False,
)
def watch_serving(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    with control_plane.database.read() as connection:
        recorded = list(list_in_production(connection))
        restored = list_restoring(connection)
    left = [deployment for deployment, run_id in restored if is_deployment_given_up(context.instance, run_id)]
    if not recorded and not left:
        return dg.SensorResult(skip_reason="nothing is served")
    try:
        found = {served.name: served for served in control_plane.engine.served()}
    except EngineError as error:  # one that is away serves it again as it comes back
        return dg.SensorResult(skip_reason=f"the engine does not say what it serves: {error}")
    for deployment in [*recorded, *left]:
        difference = find_difference(deployment, found.get(deployment.model.served_name))
        if difference is None:
            if deployment in left:  # the engine had it still, and serves it
                with control_plane.database.write() as connection:
                    mark_restored(connection, deployment)
            continue
        # What was promoted, replaced or withdrawn since is not lost: that is looked at once more, and not by two at once.
        with control_plane.database.write() as connection:
            if mark_lost(connection, deployment, difference):
                context.log.warning(f"{deployment.name} version {deployment.version} is to be deployed again: {difference}")
    return dg.SensorResult(skip_reason=f"looked at {pluralize(len(recorded), 'served model')}")


def is_deployment_given_up(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether nothing deploys a version of a run any more: what was tried last failed as often as it may, or was ended."""
    runs = instance.get_runs(dg.RunsFilter(tags={PARTITION_TAG: run_id}))
    newest = next((run for run in runs if selected_steps(run) == {DEPLOYMENT_STEP}), None)
    if newest is None or newest.status == dg.DagsterRunStatus.CANCELED:
        return newest is not None
    return newest.status == dg.DagsterRunStatus.FAILURE and count_retries(newest) >= MAX_RETRIES


def find_difference(deployment: Deployment, served: Served | None) -> str | None:
    """In what the engine differs from the record, as one line; None where it does not."""
    if served is None:
        return "the engine does not know it"
    if (served.version, served.sha256) != (deployment.version, deployment.sha256):
        return f"the engine has version {served.version} with SHA-256 {served.sha256}"
    if served.status == "refused":
        return f"the engine refuses it: {served.reason}"
    return None
