"""A job's run was terminated, as Dagster's UI offers it -> the job is cancelled: it counted as running for ever."""

from contextlib import suppress

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from resources.errors import HanzoError
from sensors.decisions.job_runs import newest_run
from sensors.sensor import SLOW_INTERVAL_SECONDS, sensor


@sensor(interval=SLOW_INTERVAL_SECONDS, description="Cancels the job of each run that was terminated.", requests_runs=False)
def cancel_terminated_jobs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    # From the jobs to their runs: of those there are few, of cancelled runs a sweep leaves hundreds.
    with control_plane.database.read() as connection:
        active = [job.id for job in control_plane.jobs.active(connection)]
        resumed_at = {job_id: control_plane.jobs.resumed_at(job_id, connection) for job_id in active}
    for job_id in active:
        newest = newest_run(context.instance, job_id, resumed_at[job_id])
        if newest is not None and newest.status == dg.DagsterRunStatus.CANCELED:
            with suppress(HanzoError):  # somebody was faster, and others wait to be looked at
                control_plane.jobs.cancel(job_id, f"its run was terminated in Dagster (run {newest.run_id})")
    return dg.SensorResult()
