"""Decide which failed Dagster runs are retried, and which fail their job."""

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.failure_reason import EXIT_REASON
from hanzo_ml_assets.preparation import PREPARATION_TAG
from hanzo_ml_assets.run_tags import ORGANIZATION_TAG, VERSION_TAG
from recipes.contracts.exit_reason import ExitReason, classify_exception_name
from resources.errors import HanzoError
from resources.hpo.sweeps import SWEEP_KEY
from resources.metadata.jobs import ACTIVE_STATUSES, JobRecord
from sensors.decisions.job_runs import PARTITION_TAG, PRIORITY_TAG, began_after

# Why the steps of a failed Dagster run failed, with the first message, read from the run's event log.

OUR_CLASS = re.compile(r"^(?:recipes|resources|hanzo_ml_assets)\.[\w.]+: ")
"""Prefix of our own error messages in logs of releases that recorded no exit reason."""


@dataclass(frozen=True)
class RunFailure:
    """The exit reasons of a run's failed steps, and a one-line cause naming the run."""

    reasons: frozenset[ExitReason]
    cause: str


def read_failure(instance: dg.DagsterInstance, run: dg.DagsterRun) -> RunFailure:
    """Read the run's log, which is too expensive for every sensor tick."""
    logs = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    events = [entry.dagster_event for entry in logs if entry.dagster_event is not None]
    message = next(filter(None, map(failure_message, events)), "its worker died")
    return RunFailure(
        reasons=frozenset(reason for reason in map(read_exit_reason, events) if reason is not None),
        cause=f"{message} (run {run.run_id} in Dagster)",
    )


def read_exit_reason(event: dg.DagsterEvent) -> ExitReason | None:
    """Return the recorded exit reason, else that of the error's class, else None."""
    data = event.step_failure_data
    recorded = data.user_failure_data.metadata.get(EXIT_REASON) if data.user_failure_data is not None else None
    if recorded is not None and recorded.value in set(ExitReason):
        return ExitReason(recorded.value)
    return classify_exception_name(str((data.error.cause or data.error).cls_name)) if data.error is not None else None


def failure_message(event: dg.DagsterEvent) -> str:
    """Return the failure's description, else the message of the innermost error."""
    data = event.step_failure_data
    if data.user_failure_data is not None and data.user_failure_data.description:
        return " ".join(data.user_failure_data.description.split())
    error = data.error.cause or data.error if data.error is not None else None
    return " ".join(OUR_CLASS.sub("", error.message, count=1).split()) if error is not None else ""


# Retries of Dagster runs: a new run of the same assets, tagged with the run that it retries and their number.

RETRIED_RUN_TAG = "hanzo_ml/retry_of"
RETRIES_TAG = "hanzo_ml/retries"
MAX_RETRIES = 20
FAILURE_REASON_TAG = "dagster/failure_reason"
DATA_TAGS = (VERSION_TAG, ORGANIZATION_TAG, PREPARATION_TAG)
"""Tags by which a run without a partition finds its input."""


def make_retry_request(run: dg.DagsterRun, *, made_progress: bool = False) -> dg.RunRequest:
    """Request a new run of the same assets.

    It resumes unfinished programs and skips finished work. `made_progress` resets the retry count, which ends at
    `MAX_RETRIES`.
    """
    kept = {tag: run.tags[tag] for tag in (PRIORITY_TAG, *DATA_TAGS) if tag in run.tags}
    return dg.RunRequest(
        run_key=f"retry-{run.run_id}",
        asset_selection=sorted(run.asset_selection or ()),
        partition_key=run.tags.get(PARTITION_TAG),
        tags={**kept, RETRIED_RUN_TAG: run.run_id, RETRIES_TAG: str(1 if made_progress else count_retries(run) + 1)},
    )


def count_retries(run: dg.DagsterRun) -> int:
    return int(run.tags.get(RETRIES_TAG, "0"))


def was_retried(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    return bool(instance.get_runs(dg.RunsFilter(tags={RETRIED_RUN_TAG: run.run_id}), limit=1))


def can_retry_dead_worker(run: dg.DagsterRun) -> bool:
    """Whether the run's worker died; an error in a step would only repeat itself."""
    died = run.tags.get(FAILURE_REASON_TAG) != "STEP_FAILURE"
    return died and bool(run.asset_selection) and count_retries(run) < MAX_RETRIES


def selected_steps(run: dg.DagsterRun) -> set[str]:
    return {key.path[-1] for key in run.asset_selection or ()}


def has_active_retry(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether a newer run does some of the same work, or another one is unfinished."""
    works_on = {tag: run.tags[tag] for tag in (PARTITION_TAG, *DATA_TAGS) if tag in run.tags}
    if not works_on:
        return False
    found = [each for each in instance.get_runs(dg.RunsFilter(tags=works_on)) if selected_steps(each) & selected_steps(run)]
    return any(not each.is_finished for each in found) or any(each.run_id != run.run_id for each in found[:1])


# Retry failed runs: one that failed for infrastructure reasons is retried, any other marks its job as failed.
#
# The decision is stored once as a run tag, because reading the run's log on every sensor tick is expensive.

RETRY_TAG = "hanzo_ml/again"
"""Run tag with the decision, YES or NO, and its run id: a run relaunched in the Dagster UI inherits the tag."""
YES, NO = "yes", "no"
JOB_ASSETS = {"checkpoint", "command"}
"""Assets whose runs work for a job; runs of other assets use a job's results."""
EXPORT_ASSETS = {"merged", "gguf"}
DOWNSTREAM_ASSETS = {"evaluation", "version", *EXPORT_ASSETS}
DATASETS_PREFIX = "datasets"
"""First part of the keys of assets that check, split and prepare."""
MAX_ERROR_RETRIES = 5
IS_RETRIED = ", which is tried again"
LOOK_BACK = timedelta(days=7)
"""Older failed runs are ignored; covers as long an outage of the stack."""


def is_retried(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether a failed run is retried, decided at the first call.

    The job is updated before the run is tagged: after a crash in between, the same update is repeated without effect.
    """
    if known := stored_decision(run):
        return known == YES
    if has_active_retry(instance, run):
        return False  # the outcome of that run is not known yet
    again = False
    with suppress(HanzoError):  # the job was deleted; the other runs still need their decision
        again = decide_run(instance, run, control_plane)
    instance.add_run_tags(run.run_id, {RETRY_TAG: f"{YES if again else NO} {run.run_id}"})
    return again


def stored_decision(run: dg.DagsterRun) -> str:
    """Return YES, NO or "" (undecided). Tags of older releases have no run id."""
    decision, _, run_id = str(run.tags.get(RETRY_TAG, "")).partition(" ")
    return decision if run_id in ("", run.run_id) else ""


def is_given_up(record: dg.RunRecord, now: datetime) -> bool:
    """Whether a failed run will not be retried; False while undecided."""
    if now - record.update_timestamp.replace(tzinfo=UTC) > LOOK_BACK:
        return True
    return stored_decision(record.dagster_run) == NO


def decide_run(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether a run is retried; if not, its job fails, unless it has ended already.

    Raises:
        HanzoError: the job was deleted.
    """
    partition, steps = run.tags.get(PARTITION_TAG), selected_steps(run)
    if preparation := run.tags.get(PREPARATION_TAG):
        return decide_for_job(instance, run, preparation, control_plane)
    if partition is not None and steps & JOB_ASSETS:
        return decide_for_job(instance, run, partition, control_plane)
    if partition is not None and steps & DOWNSTREAM_ASSETS:
        failure = read_failure(instance, run)
        again = steps <= DOWNSTREAM_ASSETS and may_retry(run, failure)
        reason = f"what follows its training failed: {failure.cause}{IS_RETRIED if again else ''}"
        control_plane.jobs.fail_evaluation(partition, reason)
        if not again and steps & EXPORT_ASSETS:
            fail_exports(partition, failure, control_plane)
        return again
    is_data = bool(run.asset_selection) and all(key.path[0] == DATASETS_PREFIX for key in run.asset_selection)
    return is_data and may_retry(run, read_failure(instance, run))


def fail_exports(job_id: str, failure: RunFailure, control_plane: ControlPlane) -> None:
    """Mark versions still awaiting their export as failed, as the worker may have died."""
    with control_plane.database.write() as connection:
        job = control_plane.jobs.get(job_id, connection)
        for version in control_plane.registry.list_by_run(job.organization, job_id, connection):
            if version.status == "pending":
                control_plane.registry.fail_export(connection, version, failure.cause)


def decide_for_job(instance: dg.DagsterInstance, run: dg.DagsterRun, job_id: str, control_plane: ControlPlane) -> bool:
    """Decide about a run that works for a job; without a retry the job fails.

    A run that failed before its job started left the job queued, and its run key is used up.
    """
    with control_plane.database.read() as connection:
        job = control_plane.jobs.get(job_id, connection)
        resumed_at = control_plane.jobs.resumed_at(job_id, connection)
    if job.status not in ACTIVE_STATUSES or not began_after(instance, run, resumed_at):
        return False
    failure = read_failure(instance, run)
    again = may_retry(run, failure) or waits_for_store(job, failure)
    if again and selected_steps(run) & JOB_ASSETS:  # until the retry follows the program and reports its progress
        control_plane.jobs.set_waiting_reason(job_id, f"its run failed: {failure.cause}{IS_RETRIED}", "running")
    if not again:
        control_plane.jobs.fail(job_id, f"its run failed: {failure.cause}")
    return again


def may_retry(run: dg.DagsterRun, failure: RunFailure) -> bool:
    return count_retries(run) < MAX_ERROR_RETRIES and any(is_retryable(run, reason) for reason in failure.reasons)


def is_retryable(run: dg.DagsterRun, reason: ExitReason) -> bool:
    """Whether a failure for this reason is retried.

    Compute restarts a training or a command by itself, up to its limit: its run is retried only for a failure outside the
    program. Without this, weeks of training were lost to a database outage at the end, and a sweep lost trial after trial to
    a full store, although trials cannot be resumed.
    """
    return reason.is_outside_program if selected_steps(run) & JOB_ASSETS else reason.is_infrastructure


def waits_for_store(job: JobRecord, failure: RunFailure) -> bool:
    """Whether a sweep trial keeps waiting for its store, however long the outage takes.

    A failed trial cannot be resumed, but a waiting one is cancelled with its sweep. A store that refuses its keys is not an
    outage: a sweep waited for that until it was cancelled by hand, and never reported why.
    """
    return SWEEP_KEY in job.config and any(reason.is_store_outage for reason in failure.reasons)
