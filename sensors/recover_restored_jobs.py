"""Rerun jobs whose end is missing from a restored database, or whose run from Dagster."""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.preparation import PREPARATION_TAG
from resources.metadata.jobs import ACTIVE_STATUSES, PREPARATION, JobRecord
from sensors import start_submitted_jobs, start_submitted_preparations
from sensors.decisions.job_runs import PARTITION_TAG, to_datetime
from sensors.decisions.retry_policy import JOB_ASSETS, NO, make_retry_request, selected_steps, stored_decision, was_retried
from sensors.sensor import SLOW_INTERVAL_SECONDS, sensor


@sensor(
    interval=SLOW_INTERVAL_SECONDS,
    description="Resumes each job whose end is missing from a restored database, or whose run is missing from Dagster.",
)
def go_on_with_put_back_jobs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    instance, jobs = context.instance, control_plane.jobs
    with control_plane.database.read() as connection:
        active = [(job, jobs.resumed_at(job.id, connection)) for job in jobs.active(connection)]
        preparing = jobs.running(PREPARATION, connection)
    requests = [
        start_submitted_preparations.make_run_request(context, job) for job in preparing if has_no_run(instance, job)
    ]
    for job, resumed_at in active:
        if job.status == "running" and has_no_run(instance, job):
            requests.append(start_submitted_jobs.make_run_request(instance, job))
            continue
        run = newest_program_run(instance, job, resumed_at)
        if run is None or not has_recorded_end(run) or was_retried(instance, run):
            continue
        if jobs.read(job.id).status in ACTIVE_STATUSES:  # read again: the job may have ended with its run meanwhile
            requests.append(make_retry_request(run))
    return dg.SensorResult(run_requests=requests)


def has_no_run(instance: dg.DagsterInstance, job: JobRecord) -> bool:
    """Whether Dagster has no run of the job, finished ones included."""
    tag = PREPARATION_TAG if job.type == PREPARATION else PARTITION_TAG
    return not instance.get_runs(dg.RunsFilter(tags={tag: job.id}), limit=1)


def newest_program_run(instance: dg.DagsterInstance, job: JobRecord, resumed_at: int) -> dg.DagsterRun | None:
    """Return the newest run that worked for the job since its last resume."""
    if job.type == PREPARATION:
        return next(iter(instance.get_runs(dg.RunsFilter(tags={PREPARATION_TAG: job.id}), limit=1)), None)
    filters = dg.RunsFilter(tags={PARTITION_TAG: job.id}, created_after=to_datetime(resumed_at))
    return next((run for run in instance.get_runs(filters) if selected_steps(run) & JOB_ASSETS), None)


def has_recorded_end(run: dg.DagsterRun) -> bool:
    """Whether a run has ended and its outcome was recorded."""
    return bool(run.status == dg.DagsterRunStatus.SUCCESS or stored_decision(run) == NO)
