"""A job was cancelled -> end its Dagster run, which ends its program within the grace period."""

from datetime import UTC, datetime

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.preparation import PREPARATION_TAG
from resources.metadata.outbox import Event
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
        jobs = {event.key: control_plane.jobs.find(event.key, connection) for event in events}
    for event in events:
        cursor = event.seq
        job = jobs[event.key]
        for run in runs_to_end(context.instance, event, resumed=job is not None and job.status != "cancelled"):
            context.instance.run_coordinator.cancel_run(run.run_id)
    return dg.SensorResult(cursor=str(cursor))


def runs_to_end(instance: dg.DagsterInstance, event: Event, *, resumed: bool) -> list[dg.DagsterRun]:
    """Those of the cancelled job that are in progress. Of one that was resumed since, newer runs are wanted."""
    before = datetime.fromtimestamp(event.created_at / 1000, UTC) if resumed else None
    filters = (
        dg.RunsFilter(tags={tag: event.key}, statuses=IN_PROGRESS, created_before=before)
        for tag in ("dagster/partition", PREPARATION_TAG)
    )
    return [run for each in filters for run in instance.get_runs(each)]
