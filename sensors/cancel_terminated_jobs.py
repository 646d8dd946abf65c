"""A job's run was terminated, as Dagster's UI offers it -> the job is cancelled: it counted as running for ever."""

from contextlib import suppress

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from resources.errors import HanzoError
from resources.metadata.jobs import PREPARATION
from sensors.decisions.job_runs import job_tag, newest_run
from sensors.sensor import SLOW_INTERVAL_SECONDS, sensor


@sensor(interval=SLOW_INTERVAL_SECONDS, description="Cancels the job of each run that was terminated.", requests_runs=False)
def cancel_terminated_jobs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    # From the jobs to their runs: of those there are few, of cancelled runs a sweep leaves hundreds.
    with control_plane.database.read() as connection:
        active = [*control_plane.jobs.active(connection), *control_plane.jobs.running(PREPARATION, connection)]
        resumed_at = {job.id: control_plane.jobs.resumed_at(job.id, connection) for job in active}
    for job in active:
        newest = newest_run(context.instance, job.id, resumed_at[job.id], job_tag(job))
        if newest is not None and newest.status == dg.DagsterRunStatus.CANCELED:
            with suppress(HanzoError):  # somebody was faster, and others wait to be looked at
                control_plane.jobs.cancel(job.id, f"its run was terminated in Dagster (run {newest.run_id})")
    return dg.SensorResult()
