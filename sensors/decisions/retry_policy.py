"""Retry failed runs. A run that failed for infrastructure reasons is retried, any other marks its job as failed.

The decision is stored once as a run tag, because reading the run's log on every sensor tick is expensive.
"""

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.preparation import PREPARATION_TAG
from recipes.contracts.exit_reason import ExitReason
from resources.errors import HanzoError
from resources.hpo.sweeps import SWEEP_KEY
from resources.metadata.jobs import ACTIVE, JobRecord
from sensors.decisions.job_runs import PARTITION_TAG, is_since
from sensors.failures import Failure, read_failure
from sensors.retries import has_active_retry, retries_of, steps_of

RETRY_TAG = "hanzo_ml/again"
"""Run tag with the decision, YES or NO, and the run that it is about: a run launched again in the Dagster UI inherits it."""
YES, NO = "yes", "no"
JOB_ASSETS = {"checkpoint", "command"}
"""Assets whose runs work for a job; runs of other assets use what a job has made."""
DOWNSTREAM_ASSETS = {"evaluation", "version", "merged", "gguf"}
DATASETS = "datasets"
"""First part of the keys of assets that check, split and prepare."""
MAX_ERROR_RETRIES = 5
IS_RETRIED = ", which is tried again"
LOOK_BACK = timedelta(days=7)
"""How long ago a run may have failed that is looked at: for as long the stack may have been down."""


def is_retried(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether a failed run is retried, decided at the first call.

    The job is updated before the run is tagged: after a crash in between the same update is repeated, which changes nothing.
    """
    if known := stored_decision(run):
        return known == YES
    if has_active_retry(instance, run):
        return False  # how that run ends is not known yet
    again = False
    with suppress(HanzoError):  # the job was deleted; the other runs still need their decision
        again = decide(instance, run, control_plane)
    instance.add_run_tags(run.run_id, {RETRY_TAG: f"{YES if again else NO} {run.run_id}"})
    return again


def stored_decision(run: dg.DagsterRun) -> str:
    """YES or NO; empty where this run has none yet. Tags of older releases hold no run id, and count for any run."""
    decision, _, run_id = str(run.tags.get(RETRY_TAG, "")).partition(" ")
    return decision if run_id in ("", run.run_id) else ""


def is_given_up(record: dg.RunRecord, now: datetime) -> bool:
    """Whether the work of a failed run is not tried again; False while that is undecided."""
    if now - record.update_timestamp.replace(tzinfo=UTC) > LOOK_BACK:
        return True
    return stored_decision(record.dagster_run) == NO


def decide(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether a run is retried. Otherwise its job fails, unless that has ended already.

    Raises:
        HanzoError: the job was deleted.
    """
    partition, steps = run.tags.get(PARTITION_TAG), steps_of(run)
    if preparation := run.tags.get(PREPARATION_TAG):
        return decide_for_job(instance, run, preparation, control_plane)
    if partition is not None and steps & JOB_ASSETS:
        return decide_for_job(instance, run, partition, control_plane)
    if partition is not None and steps & DOWNSTREAM_ASSETS:
        failure = read_failure(instance, run)
        again = steps <= DOWNSTREAM_ASSETS and may_retry(run, failure)
        reason = f"what follows its training failed: {failure.cause}{IS_RETRIED if again else ''}"
        control_plane.jobs.fail_evaluation(partition, reason)
        return again
    is_data = bool(run.asset_selection) and all(key.path[0] == DATASETS for key in run.asset_selection)
    return is_data and may_retry(run, read_failure(instance, run))


def decide_for_job(instance: dg.DagsterInstance, run: dg.DagsterRun, job_id: str, control_plane: ControlPlane) -> bool:
    """Decide about a run that works for a job; the job fails where the run is not retried.

    A run that failed before its job began has left it queued, and its run key is used up.
    """
    with control_plane.database.read() as connection:
        job = control_plane.jobs.get(job_id, connection)
        resumed_at = control_plane.jobs.resumed_at(job_id, connection)
    if job.status not in ACTIVE or not is_since(instance, run, resumed_at):
        return False
    failure = read_failure(instance, run)
    again = may_retry(run, failure) or waits_for_store(job, failure)
    if again and steps_of(run) & JOB_ASSETS:  # until the retry follows the program, and reports what that waits for
        control_plane.jobs.wait_for(job_id, f"its run failed: {failure.cause}{IS_RETRIED}", "running")
    if not again:
        control_plane.jobs.fail(job_id, f"its run failed: {failure.cause}")
    return again


def may_retry(run: dg.DagsterRun, failure: Failure) -> bool:
    return retries_of(run) < MAX_ERROR_RETRIES and any(is_retryable(run, reason) for reason in failure.reasons)


def is_retryable(run: dg.DagsterRun, reason: ExitReason) -> bool:
    """Whether a failure for this reason is retried.

    A training or a command was restarted by compute as often as it may be: its run is retried only where the failure was
    outside the program. A training of weeks failed because the database was away as its end was recorded; and a sweep lost
    trial after trial to a full store, and a trial cannot be resumed.
    """
    return reason.is_outside_program if steps_of(run) & JOB_ASSETS else reason.is_infrastructure


def waits_for_store(job: JobRecord, failure: Failure) -> bool:
    """Whether a trial of a sweep keeps its place until its store is back, however long that takes.

    A failed trial cannot be resumed, but a waiting one is cancelled with its sweep. A store that refuses its keys is no
    outage: a sweep waited for that until somebody cancelled it, and never said why.
    """
    return SWEEP_KEY in job.config and any(reason.is_store_outage for reason in failure.reasons)
