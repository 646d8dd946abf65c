"""Compare what the engine serves with the record, and have lost deployments redeployed.

An engine that lost its state knows no model; one that was killed during a swap may serve another version; a restarted one
refuses files that have changed, which only its own log would show. Deployments given up while the engine was down are
reported again once it is back.
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
    description="Reports each deployment that the engine does not serve as recorded, so that it is deployed again.",
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
    except EngineError as error:  # an engine that is down serves its models again after its restart
        return dg.SensorResult(skip_reason=f"the engine does not say what it serves: {error}")
    for deployment in [*recorded, *left]:
        difference = find_difference(deployment, found.get(deployment.model.served_name))
        if difference is None:
            if deployment in left:  # the engine still had it and serves it
                with control_plane.database.write() as connection:
                    mark_restored(connection, deployment)
            continue
        # mark_lost checks again: versions promoted, replaced or withdrawn since are not lost, and only one caller wins.
        with control_plane.database.write() as connection:
            if mark_lost(connection, deployment, difference):
                context.log.warning(f"{deployment.name} version {deployment.version} is to be deployed again: {difference}")
    return dg.SensorResult(skip_reason=f"checked {pluralize(len(recorded), 'served model')}")


def is_deployment_given_up(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether the run's last deployment was cancelled or has used up its retries."""
    runs = instance.get_runs(dg.RunsFilter(tags={PARTITION_TAG: run_id}))
    newest = next((run for run in runs if selected_steps(run) == {DEPLOYMENT_STEP}), None)
    if newest is None or newest.status == dg.DagsterRunStatus.CANCELED:
        return newest is not None
    return newest.status == dg.DagsterRunStatus.FAILURE and count_retries(newest) >= MAX_RETRIES


def find_difference(deployment: Deployment, served: Served | None) -> str | None:
    """Return how the engine differs from the record, as one line, or None."""
    if served is None:
        return "the engine does not know it"
    if (served.version, served.sha256) != (deployment.version, deployment.sha256):
        return f"the engine has version {served.version} with SHA-256 {served.sha256}"
    if served.status == "refused":
        return f"the engine refuses it: {served.reason}"
    return None
