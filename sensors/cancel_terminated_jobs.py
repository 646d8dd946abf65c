"""Cancel jobs whose run was terminated in the Dagster UI, which otherwise count as running."""

from contextlib import suppress

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from resources.errors import HanzoError
from resources.metadata.jobs import PREPARATION
from sensors.decisions.job_runs import job_tag, newest_run
from sensors.sensor import SLOW_INTERVAL_SECONDS, sensor


@sensor(interval=SLOW_INTERVAL_SECONDS, description="Cancels the job of each run that was terminated.", requests_runs=False)
def cancel_terminated_jobs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    # Look up runs by job: there are few active jobs, while a sweep leaves hundreds of cancelled runs.
    with control_plane.database.read() as connection:
        active = [*control_plane.jobs.active(connection), *control_plane.jobs.running(PREPARATION, connection)]
        resumed_at = {job.id: control_plane.jobs.resumed_at(job.id, connection) for job in active}
    for job in active:
        newest = newest_run(context.instance, job.id, resumed_at[job.id], job_tag(job))
        if newest is not None and newest.status == dg.DagsterRunStatus.CANCELED:
            with suppress(HanzoError):  # ended concurrently; continue with the other jobs
                control_plane.jobs.cancel(job.id, f"its run was terminated in Dagster (run {newest.run_id})")
    return dg.SensorResult()
