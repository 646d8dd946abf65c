"""End the Dagster run of each cancelled job, and thereby its program.

Programs whose worker has died are terminated here, because nothing else would notice them. The same holds for programs
without a job, such as evaluations, whose run was cancelled.
"""

from datetime import UTC, datetime, timedelta

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.preparation import PREPARATION_TAG
from hanzo_ml_assets.supervisor import is_abandoned
from recipes.contracts.job import Program
from resources.metadata.outbox import Event, now_ms
from sensors.decisions.job_runs import IN_PROGRESS, PARTITION_TAG, has_no_unfinished_run, job_tag
from sensors.sensor import INTERVAL_SECONDS, read_cursor, read_new_events, sensor

JOB_PROGRAMS = (Program.TRAIN, Program.COMMAND)
"""Programs that always work for a job. The job's record decides when they end: they may wait without a run."""
LOOK_BACK = timedelta(days=7)
"""Jobs that ended earlier are ignored; covers as long an outage of the stack."""


@sensor(interval=INTERVAL_SECONDS, description="Ends the run of each cancelled job.", requests_runs=False)
def stop_cancelled_jobs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    with control_plane.database.read() as connection:
        cursor = read_cursor(context, connection)
        events = read_new_events(cursor, connection, "job.cancelled")
        jobs = {event.key: control_plane.jobs.find(event.key, connection) for event in events}
    for event in events:
        cursor = cursor.after(event)
        job = jobs[event.key]
        for run in find_runs_to_end(context.instance, event, resumed=job is not None and job.status != "cancelled"):
            context.instance.run_coordinator.cancel_run(run.run_id)
    terminate_orphaned_programs(context, control_plane)
    terminate_abandoned_programs(context, control_plane)
    return dg.SensorResult(cursor=str(cursor))


def find_runs_to_end(instance: dg.DagsterInstance, event: Event, *, resumed: bool) -> list[dg.DagsterRun]:
    """Return the cancelled job's runs in progress, without those of a later resume."""
    before = datetime.fromtimestamp(event.created_at / 1000, UTC) if resumed else None
    filters = (
        dg.RunsFilter(tags={tag: event.key}, statuses=IN_PROGRESS, created_before=before)
        for tag in (PARTITION_TAG, PREPARATION_TAG)
    )
    return [run for each in filters for run in instance.get_runs(each)]


def terminate_orphaned_programs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> None:
    """Terminate the programs of cancelled or failed jobs that no Dagster run supervises any more."""
    since = now_ms() - int(LOOK_BACK.total_seconds() * 1000)
    with control_plane.database.read() as connection:
        broken_off = control_plane.jobs.list_failed_or_cancelled(since, connection)
    for job in broken_off:
        if control_plane.compute.has_processes(job) and has_no_unfinished_run(context.instance, job.id, job_tag(job)):
            context.log.info(f"job {job.id} is {job.status}: terminating its program")
            control_plane.compute.terminate_processes(job)


def terminate_abandoned_programs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> None:
    """Terminate the programs of cancelled Dagster runs that no other run follows."""
    for program in control_plane.compute.list_unfinished():
        if program.program not in JOB_PROGRAMS and is_abandoned(context.instance, program):
            context.log.info(f"the run of {program.program} {program.id} was cancelled: terminating the program")
            control_plane.compute.terminate_processes(program)
