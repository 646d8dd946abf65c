"""A job was cancelled -> end its Dagster run, which ends its program within the grace period."""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.preparation import PREPARATION_TAG
from sensors.event_cursor import SELDOM_SECONDS, new_events, position
from sensors.sensor import sensor

IN_PROGRESS = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
]


@sensor(interval=SELDOM_SECONDS, description="Ends the run of each cancelled job.", requests_runs=False)
def stop_cancelled_jobs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    cursor = position(context)
    with control_plane.database.read() as connection:
        events = new_events(context, connection, "job.cancelled")
    for event in events:
        cursor = event.seq
        for tag in ("dagster/partition", PREPARATION_TAG):
            for run in context.instance.get_runs(dg.RunsFilter(tags={tag: event.key}, statuses=IN_PROGRESS)):
                context.instance.run_coordinator.cancel_run(run.run_id)
    return dg.SensorResult(cursor=str(cursor))
