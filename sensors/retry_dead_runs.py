"""A run failed -> go on with it in a new one when only its worker had died; else its job, if it has one, has failed.

Dagster's own run retries read the failed run's record while it is still being written, and then never look again: a run
whose worker and daemon were killed together was lost. This one looks at the state, as often as it takes.
"""

from datetime import UTC, datetime, timedelta

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.dataset import VERSION_TAG
from resources.errors import HanzoError
from sensors.event_cursor import INTERVAL_SECONDS

RETRY_OF = "hanzo_ml/retry_of"
RETRIES = "hanzo_ml/retries"
MAX_RETRIES = 20
FAILURE_REASON = "dagster/failure_reason"
LOOK_BACK = timedelta(days=7)
SETTLED = timedelta(seconds=1)
"""A failed run's tags are written after its status: younger ones are left for the next look."""


@dg.sensor(
    asset_selection=dg.AssetSelection.all(),
    minimum_interval_seconds=INTERVAL_SECONDS,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Goes on with each run whose worker died, and fails the job of each run that failed for good.",
)
def retry_dead_runs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    now = datetime.now(UTC)
    filters = dg.RunsFilter(
        statuses=[dg.DagsterRunStatus.FAILURE], updated_after=now - LOOK_BACK, updated_before=now - SETTLED
    )
    requests = []
    for run in context.instance.get_runs(filters):
        if may_be_retried(run):
            if not context.instance.get_runs(dg.RunsFilter(tags={RETRY_OF: run.run_id}), limit=1):
                requests.append(retry(run))
        else:
            fail_job(context.instance, run, control_plane)
    return dg.SensorResult(run_requests=requests)


def may_be_retried(run: dg.DagsterRun) -> bool:
    """Whether the run's worker died. An error of its own would only repeat itself."""
    died = run.tags.get(FAILURE_REASON) != "STEP_FAILURE"
    return died and bool(run.asset_selection) and int(run.tags.get(RETRIES, "0")) < MAX_RETRIES


def retry(run: dg.DagsterRun) -> dg.RunRequest:
    """The same work once more: programs go on from what is there, and work that is done is not done again."""
    kept = {tag: run.tags[tag] for tag in (VERSION_TAG,) if tag in run.tags}
    return dg.RunRequest(
        run_key=f"retry-{run.run_id}",
        asset_selection=sorted(run.asset_selection or ()),
        partition_key=run.tags.get("dagster/partition"),
        tags={**kept, RETRY_OF: run.run_id, RETRIES: str(int(run.tags.get(RETRIES, "0")) + 1)},
    )


def fail_job(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> None:
    """Mark the job of a training run failed, unless a newer run goes on with it."""
    partition = run.tags.get("dagster/partition")
    if partition is None or not any(key.path[-1] == "checkpoint" for key in run.asset_selection or ()):
        return
    if instance.get_runs(dg.RunsFilter(tags={"dagster/partition": partition}), limit=1)[0].run_id != run.run_id:
        return
    try:
        job = control_plane.jobs.read(partition)
    except HanzoError:
        return
    if job.status == "running":
        control_plane.jobs.fail(partition, f"its training run failed: see run {run.run_id} in Dagster")
