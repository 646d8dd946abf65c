"""Retry runs whose worker died, or that failed for infrastructure reasons (`sensors.decisions.retry_policy`); fail the jobs
of others.

Dagster's own run retries read the failed run's record while it is still being written, and then never look again: a run
whose worker and daemon were killed together was lost. This sensor looks at the state, as often as it takes.
"""

from datetime import UTC, datetime, timedelta

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.deployment import find_last_promotion
from hanzo_ml_assets.preparation import PREPARATION_TAG
from recipes.contracts.job import Program
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST_FILE
from recipes.storage.buckets import StoreUnavailable
from resources.compute.base import JobRef
from resources.metadata.jobs import COMMAND
from resources.metadata.registry.deployments import find_by_promotion, is_being_deployed
from sensors.decisions.job_runs import PARTITION_TAG, began_after
from sensors.decisions.retry_policy import (
    JOB_ASSETS,
    LOOK_BACK,
    MAX_ERROR_RETRIES,
    MAX_RETRIES,
    can_retry_dead_worker,
    count_retries,
    has_active_retry,
    is_retried,
    make_retry_request,
    selected_steps,
    was_retried,
)
from sensors.sensor import INTERVAL_SECONDS, sensor

DEPLOYMENT_STEP = "deployment"
DEPLOYMENT_RETRY_PAUSE = timedelta(seconds=15)
"""Before a deployment is retried, times the retries so far: an outage may last for most of an hour."""
ERROR_RETRY_PAUSE = timedelta(minutes=2)
"""Before any other run that failed by an error is retried, growing with each retry to at most a quarter of an hour."""
SETTLING_TIME = timedelta(seconds=1)
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
        due = waited >= SETTLING_TIME and is_retry_due(instance, run, waited, control_plane)
        if due and not was_retried(instance, run) and is_retry_wanted(instance, run, control_plane):
            requests.append(make_retry_request(run, made_progress=has_made_progress(record, control_plane)))
    return dg.SensorResult(run_requests=requests)


def has_made_progress(record: dg.RunRecord, control_plane: ControlPlane) -> bool:
    """Whether the program of a run works on, or saved a checkpoint since the run began: who follows it may die as often as
    somebody likes. A training of weeks failed, as its stack was ended for the twenty-first time.
    """
    run, store = record.dagster_run, control_plane.store
    if PARTITION_TAG not in run.tags or not selected_steps(run) & JOB_ASSETS:
        return False
    job_id, program = run.tags[PARTITION_TAG], Program.COMMAND if COMMAND in selected_steps(run) else Program.TRAIN
    if control_plane.compute.has_processes(JobRef(job_id, program)):
        return True
    began = record.create_timestamp.replace(tzinfo=UTC).timestamp() * 1000
    try:
        saved = store.list(uris.run_checkpoints(job_id))
        return any(store.modified_ms(uri) > began for uri in saved if uri.endswith(f"/{MANIFEST_FILE}"))
    except (FileNotFoundError, StoreUnavailable):  # one that is deleted just now, or nobody can say
        return False


def is_retry_due(instance: dg.DagsterInstance, run: dg.DagsterRun, waited: timedelta, control_plane: ControlPlane) -> bool:
    """Whether a run is to be retried and its pause is over. Fails its job where it never is."""
    if can_retry_dead_worker(run):
        return True
    if selected_steps(run) == {DEPLOYMENT_STEP}:
        return count_retries(run) < MAX_RETRIES and waited >= DEPLOYMENT_RETRY_PAUSE * count_retries(run)
    pauses = min(count_retries(run), MAX_ERROR_RETRIES) + 1
    return is_retried(instance, run, control_plane) and waited >= ERROR_RETRY_PAUSE * pauses


def is_retry_wanted(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether a run that may be tried again still is to be."""
    if can_retry_dead_worker(run):
        return is_job_wanted(instance, run, control_plane)
    if selected_steps(run) == {DEPLOYMENT_STEP}:
        return is_deployment_unfinished(run, control_plane)
    return not has_active_retry(instance, run) and is_job_wanted(instance, run, control_plane)


def is_job_wanted(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Not one that was cancelled meanwhile, even if it was resumed again. True of a run that works for no job."""
    job_id = run.tags.get(PARTITION_TAG if selected_steps(run) & JOB_ASSETS else PREPARATION_TAG)
    if job_id is None:
        return True
    with control_plane.database.read() as connection:
        job = control_plane.jobs.find(job_id, connection)
        resumed_at = control_plane.jobs.resumed_at(job_id, connection)
    return job is None or (job.status != "cancelled" and began_after(instance, run, resumed_at))


def is_deployment_unfinished(run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
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
        made = control_plane.registry.list_by_run(job.organization, partition, connection) if job else []
        promoted = [find_last_promotion(connection, one) for one in made if one.stage == "production" and one.servable]
        return any(event is not None and find_by_promotion(connection, event.seq) is None for event in promoted)
