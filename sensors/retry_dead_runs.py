"""Retry runs whose worker died or that failed for infrastructure reasons; fail other jobs.

`sensors.decisions.retry_policy` decides. Dagster's own run retries read the failed run's record while it is still being
written, and never again: a run whose worker and daemon were killed together was lost. This sensor checks the state at every
tick.
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
"""Pause before a deployment is retried, multiplied by the retries so far: an outage may last most of an hour."""
ERROR_RETRY_PAUSE = timedelta(minutes=2)
"""Pause before any other failed run is retried, growing with each retry up to 12 minutes."""
SETTLING_TIME = timedelta(seconds=1)
"""Runs that failed more recently wait for the next tick: Dagster writes a run's tags after its status."""


@sensor(
    interval=INTERVAL_SECONDS,
    description="Retries each run whose worker died, and fails the job of each run that failed for good.",
)
def retry_dead_runs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    instance, now = context.instance, datetime.now(UTC)
    filters = dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE], updated_after=now - LOOK_BACK)
    requests = []
    for record in instance.get_run_records(filters):
        # If the clock was set back, the run ended in the future: waiting for that moment once cost an hour.
        run, waited = record.dagster_run, abs(now - record.update_timestamp.replace(tzinfo=UTC))
        due = waited >= SETTLING_TIME and is_retry_due(instance, run, waited, control_plane)
        if due and not was_retried(instance, run) and is_retry_wanted(instance, run, control_plane):
            requests.append(make_retry_request(run, made_progress=has_made_progress(record, control_plane)))
    return dg.SensorResult(run_requests=requests)


def has_made_progress(record: dg.RunRecord, control_plane: ControlPlane) -> bool:
    """Whether the program still runs, or saved a checkpoint since the Dagster run began.

    Such a run worker may die any number of times: a training of weeks failed when its stack stopped for the 21st time.
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
    except (FileNotFoundError, StoreUnavailable):  # deleted concurrently, or unknown
        return False


def is_retry_due(instance: dg.DagsterInstance, run: dg.DagsterRun, waited: timedelta, control_plane: ControlPlane) -> bool:
    """Whether a run is retried and its pause is over; fails the job of others."""
    if can_retry_dead_worker(run):
        return True
    if selected_steps(run) == {DEPLOYMENT_STEP}:
        return count_retries(run) < MAX_RETRIES and waited >= DEPLOYMENT_RETRY_PAUSE * count_retries(run)
    pauses = min(count_retries(run), MAX_ERROR_RETRIES) + 1
    return is_retried(instance, run, control_plane) and waited >= ERROR_RETRY_PAUSE * pauses


def is_retry_wanted(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether the work of a run that may be retried is still wanted."""
    if can_retry_dead_worker(run):
        return is_job_wanted(instance, run, control_plane)
    if selected_steps(run) == {DEPLOYMENT_STEP}:
        return is_deployment_unfinished(run, control_plane)
    return not has_active_retry(instance, run) and is_job_wanted(instance, run, control_plane)


def is_job_wanted(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether the job was not cancelled since the run began; true without a job."""
    job_id = run.tags.get(PARTITION_TAG if selected_steps(run) & JOB_ASSETS else PREPARATION_TAG)
    if job_id is None:
        return True
    with control_plane.database.read() as connection:
        job = control_plane.jobs.find(job_id, connection)
        resumed_at = control_plane.jobs.resumed_at(job_id, connection)
    return job is None or (job.status != "cancelled" and began_after(instance, run, resumed_at))


def is_deployment_unfinished(run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether a deployment was interrupted or never began.

    This happens when the store or database is down: the served and the registered version then differ. A version that the
    engine refused is rolled back at once.
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
