"""Retry runs whose worker died, or that failed for infrastructure reasons (`sensors.decisions.retry_policy`); fail the jobs of others.

Dagster's own run retries read the failed run's record while it is still being written, and then never look again: a run
whose worker and daemon were killed together was lost. This sensor looks at the state, as often as it takes.
"""

from datetime import UTC, datetime, timedelta

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.deployment import newest_promotion
from hanzo_ml_assets.preparation import PREPARATION_TAG
from recipes.contracts.job import Program
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST
from recipes.storage.buckets import StoreUnavailable
from resources.compute.job_key import JobRef
from resources.metadata.jobs import COMMAND
from resources.metadata.registry.deployments import is_being_deployed, of_promotion
from sensors.decisions.job_runs import PARTITION_TAG, is_since
from sensors.decisions.retry_policy import JOB_ASSETS, LOOK_BACK, MAX_ERROR_RETRIES, is_retried
from sensors.event_cursor import INTERVAL_SECONDS
from sensors.retries import MAX_RETRIES, has_active_retry, may_be_retried, retries_of, retry, steps_of, was_retried
from sensors.sensor import sensor

DEPLOYMENT = "deployment"
DEPLOYMENT_RETRY_PAUSE = timedelta(seconds=15)
"""Before a deployment is retried, times the retries so far: an outage may last for most of an hour."""
ERROR_RETRY_PAUSE = timedelta(minutes=2)
"""Before any other run that failed by an error is retried, growing with each retry to at most a quarter of an hour."""
SETTLED = timedelta(seconds=1)
"""A failed run's tags are written after its status: younger ones are left for the next look."""


@sensor(
    interval=INTERVAL_SECONDS,
    description="Goes on with each run whose worker died, and fails the job of each run that failed for good.",
)
def retry_dead_runs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    instance, now = context.instance, datetime.now(UTC)
    filters = dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE], updated_after=now - LOOK_BACK)
    requests = []
    for record in instance.get_run_records(filters):
        # Where the clock was put back, it ended later than now: to wait until then cost an hour.
        run, waited = record.dagster_run, abs(now - record.update_timestamp.replace(tzinfo=UTC))
        due = waited >= SETTLED and is_due(instance, run, waited, control_plane)
        if due and not was_retried(instance, run) and is_wanted(instance, run, control_plane):
            requests.append(retry(run, got_on=has_got_on(record, control_plane)))
    return dg.SensorResult(run_requests=requests)


def has_got_on(record: dg.RunRecord, control_plane: ControlPlane) -> bool:
    """Whether the program of a run works on, or saved a checkpoint since the run began: who follows it may die as often as
    somebody likes. A training of weeks failed, as its stack was ended for the twenty-first time.
    """
    run, store = record.dagster_run, control_plane.store
    if PARTITION_TAG not in run.tags or not steps_of(run) & JOB_ASSETS:
        return False
    job_id, program = run.tags[PARTITION_TAG], Program.COMMAND if COMMAND in steps_of(run) else Program.TRAIN
    if control_plane.compute.has_processes(JobRef(job_id, program)):
        return True
    began = record.create_timestamp.replace(tzinfo=UTC).timestamp() * 1000
    try:
        saved = store.list(uris.run_checkpoints(job_id))
        return any(store.modified(uri) > began for uri in saved if uri.endswith(f"/{MANIFEST}"))
    except (FileNotFoundError, StoreUnavailable):  # one that is deleted just now, or nobody can say
        return False


def is_due(instance: dg.DagsterInstance, run: dg.DagsterRun, waited: timedelta, control_plane: ControlPlane) -> bool:
    """Whether a run is to be retried and its pause is over. Fails its job where it never is."""
    if may_be_retried(run):
        return True
    if steps_of(run) == {DEPLOYMENT}:
        return retries_of(run) < MAX_RETRIES and waited >= DEPLOYMENT_RETRY_PAUSE * retries_of(run)
    pauses = min(retries_of(run), MAX_ERROR_RETRIES) + 1
    return is_retried(instance, run, control_plane) and waited >= ERROR_RETRY_PAUSE * pauses


def is_wanted(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether a run that may be tried again still is to be."""
    if may_be_retried(run):
        return is_job_wanted(instance, run, control_plane)
    if steps_of(run) == {DEPLOYMENT}:
        return is_left_deploying(run, control_plane)
    return not has_active_retry(instance, run) and is_job_wanted(instance, run, control_plane)


def is_job_wanted(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Not one that was cancelled meanwhile, even if it was resumed again. True of a run that works for no job."""
    job_id = run.tags.get(PARTITION_TAG if steps_of(run) & JOB_ASSETS else PREPARATION_TAG)
    if job_id is None:
        return True
    with control_plane.database.read() as connection:
        job = control_plane.jobs.find(job_id, connection)
        resumed_at = control_plane.jobs.resumed_at(job_id, connection)
    return job is None or (job.status != "cancelled" and is_since(instance, run, resumed_at))


def is_left_deploying(run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether a deployment stopped half-way, or before it began: the store or the database was away, and what is served and
    what the registry says are two versions. One that the engine refused is put back at once.
    """
    partition = run.tags.get(PARTITION_TAG)
    if partition is None:
        return False
    with control_plane.database.read() as connection:
        if is_being_deployed(connection, partition):
            return True
        job = control_plane.jobs.find(partition, connection)
        made = control_plane.registry.all_of_run(job.organization, partition, connection) if job else []
        promoted = [newest_promotion(connection, one) for one in made if one.stage == "production" and one.servable]
        return any(event is not None and of_promotion(connection, event.seq) is None for event in promoted)
