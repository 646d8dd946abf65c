"""Recover lost run workers of starting and cancelled runs; remove workers of finished runs.

Dagster's run monitor covers started runs only. It fails runs that start slowly, although their worker may just be pulling an
image and start later: so its time limit is long, and this sensor detects lost starting workers. For a cancelled worker that
is gone it waits minutes, while the worker's program keeps running.
"""

from datetime import UTC, datetime, timedelta

import dagster as dg
from dagster._core.launcher import WorkerStatus

from hanzo_ml_assets.control_plane import ControlPlane
from resources.orchestration.run_workers import RecoverableWorkers
from sensors.sensor import SLOW_INTERVAL_SECONDS, sensor

LAUNCH_TIME = timedelta(seconds=30)
"""Time for a launch to create its worker."""
CANCEL_TIME = timedelta(seconds=20)
"""Time for a worker to cancel its program and report that; longer than the pod's grace period."""
EXIT_TIME = timedelta(seconds=60)
"""Time for a worker to exit after it reported the end of its run."""


@sensor(
    interval=SLOW_INTERVAL_SECONDS,
    description="Restarts run workers that were lost before they started, and removes those of finished runs.",
    requests_runs=False,
)
def recover_run_workers(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    instance, now = context.instance, datetime.now(UTC)
    launcher = instance.run_launcher
    if not isinstance(launcher, RecoverableWorkers):
        return dg.SensorResult()
    for record in instance.get_run_records(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTING])):
        if now - last_change(record) > LAUNCH_TIME:
            launcher.recover_start(record.dagster_run)
    for record in instance.get_run_records(dg.RunsFilter(statuses=[dg.DagsterRunStatus.CANCELING])):
        run = record.dagster_run
        if now - last_change(record) > CANCEL_TIME:
            health = instance.run_launcher.check_run_worker_health(run)
            if health.status == WorkerStatus.FAILED:
                instance.report_run_canceled(run, f"Its run worker is gone: {health.msg}")
    for run_id in launcher.remove_leftovers(lambda run_id: is_over(instance, run_id, now)):
        context.log.info(f"removed the worker of run {run_id}, which is over")
    return dg.SensorResult()


def is_over(instance: dg.DagsterInstance, run_id: str, now: datetime) -> bool:
    """Whether a run was deleted, or ended long enough ago for its worker to exit."""
    record = instance.get_run_record_by_id(run_id)
    return record is None or (record.dagster_run.is_finished and now - last_change(record) > EXIT_TIME)


def last_change(record: dg.RunRecord) -> datetime:
    changed: datetime = record.update_timestamp.replace(tzinfo=UTC)
    return changed
