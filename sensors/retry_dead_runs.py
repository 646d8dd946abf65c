"""A run failed -> go on with it in a new one when only its worker had died, or had found no store; else its job, if it has
one, has failed. What follows a training is tried again where the machine is to blame.

Dagster's own run retries read the failed run's record while it is still being written, and then never look again: a run
whose worker and daemon were killed together was lost. This one looks at the state, as often as it takes.
"""

from collections.abc import Set
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.deployment import newest_promotion
from hanzo_ml_assets.preparation import PREPARATION_TAG
from hanzo_ml_assets.version_tag import ORGANIZATION_TAG, VERSION_TAG
from resources.errors import HanzoError
from resources.metadata.jobs import ACTIVE
from resources.metadata.registry.deployments import is_being_deployed, of_promotion
from sensors.event_cursor import INTERVAL_SECONDS
from sensors.runs_of_jobs import PARTITION_TAG, is_since
from sensors.sensor import sensor

PROGRAMS = {"checkpoint", "command"}
"""Assets whose runs work for a job; those of others only for what it has left."""
WHAT_FOLLOWS = {"evaluation", "version", "merged", "gguf"}
DEPLOYMENT = "deployment"
RETRY_OF = "hanzo_ml/retry_of"
RETRIES = "hanzo_ml/retries"
MAX_RETRIES = 20
FAILURE_REASON = "dagster/failure_reason"
PAUSE = timedelta(seconds=15)
"""Before a deployment is tried again, for each time that it was: an outage may last for most of an hour."""
MAX_AGAIN = 5
AGAIN_PAUSE = timedelta(minutes=2)
"""Before what follows a training is tried again, and as much longer for each time that it was."""
AGAIN = ", which is tried again"
OF_MACHINE = {"MachineFailed", "StoreUnavailable", "StoreFull", "OperationalError", "MemoryError"}
"""Errors for which neither the user nor what was trained is to blame."""
OF_WORKER = OF_MACHINE - {"MachineFailed"}
"""Those of whoever follows a program. Store or database were away as it began, or recorded the end: a training of weeks had
failed for that, which went on or was over.
"""
LOOK_BACK = timedelta(days=7)
SETTLED = timedelta(seconds=1)
"""A failed run's tags are written after its status: younger ones are left for the next look."""


@sensor(
    interval=INTERVAL_SECONDS,
    description="Goes on with each run whose worker died, and fails the job of each run that failed for good.",
)
def retry_dead_runs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    now = datetime.now(UTC)
    filters = dg.RunsFilter(
        statuses=[dg.DagsterRunStatus.FAILURE], updated_after=now - LOOK_BACK, updated_before=now - SETTLED
    )
    requests = []
    for record in context.instance.get_run_records(filters):
        run = record.dagster_run
        if may_be_retried(run):
            if not was_retried(context.instance, run) and is_wanted(context.instance, run, control_plane):
                requests.append(retry(run))
        elif steps_of(run) == {DEPLOYMENT}:
            waited = now - record.update_timestamp.replace(tzinfo=UTC) >= PAUSE * retries_of(run)
            if waited and not was_retried(context.instance, run) and is_left_deploying(run, control_plane):
                requests.append(retry(run))
        else:
            with suppress(HanzoError):  # the job is no more: it is no reason to leave the others
                fail_job(context.instance, run, control_plane)
                waited = now - record.update_timestamp.replace(tzinfo=UTC) >= AGAIN_PAUSE * (retries_of(run) + 1)
                if waited and not was_retried(context.instance, run) and is_to_be_tried_again(context, run, control_plane):
                    requests.append(retry(run))
    return dg.SensorResult(run_requests=requests)


def may_be_retried(run: dg.DagsterRun) -> bool:
    """Whether the run's worker died. An error of its own would only repeat itself."""
    died = run.tags.get(FAILURE_REASON) != "STEP_FAILURE"
    return died and bool(run.asset_selection) and retries_of(run) < MAX_RETRIES


def was_retried(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    return bool(instance.get_runs(dg.RunsFilter(tags={RETRY_OF: run.run_id}), limit=1))


def retries_of(run: dg.DagsterRun) -> int:
    return int(run.tags.get(RETRIES, "0"))


def is_left_deploying(run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether a deployment stopped half-way, or before it began: the store or the database was away, and what is served and
    what the registry says are two versions. One that the engine refused is put back at once.
    """
    partition = run.tags.get(PARTITION_TAG)
    if partition is None or retries_of(run) >= MAX_RETRIES:
        return False
    with control_plane.database.read() as connection:
        if is_being_deployed(connection, partition):
            return True
        job = control_plane.jobs.find(partition, connection)
        made = control_plane.registry.all_of_run(job.organization, partition, connection) if job else []
        promoted = [newest_promotion(connection, one) for one in made if one.stage == "production" and one.servable]
        return any(event is not None and of_promotion(connection, event.seq) is None for event in promoted)


def is_to_be_tried_again(context: dg.SensorEvaluationContext, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether that is what was said when it failed, or its job goes on without it. Its log is not read at every look."""
    partition = run.tags.get(PARTITION_TAG)
    if partition is None or not steps_of(run) <= WHAT_FOLLOWS | PROGRAMS:
        return False
    job, instance = control_plane.jobs.read(partition), context.instance
    if not steps_of(run) & PROGRAMS:
        return promises_again(job.reason, run.run_id)
    if job.status not in ACTIVE or another_goes_on(instance, run, partition):
        return False
    return is_wanted(instance, run, control_plane) and is_of_worker(instance, run)


def told(cause: str, again: bool) -> str:
    """What a job says of what follows its training. `promises_again` reads it."""
    return f"what follows its training failed: {cause}{AGAIN if again else ''}"


def promises_again(reason: str, run_id: str) -> bool:
    """Whether a job says of this run's failure (`cause_of`) that it is tried again."""
    return run_id in reason and reason.endswith(AGAIN)


def is_wanted(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether a run is to go on: not one whose job was cancelled meanwhile, even if it was resumed again."""
    job_id = run.tags.get(PARTITION_TAG)
    if job_id is None or not steps_of(run) & PROGRAMS:
        return True
    with control_plane.database.read() as connection:
        job = control_plane.jobs.find(job_id, connection)
        resumed_at = control_plane.jobs.resumed_at(job_id, connection)
    return job is None or (job.status != "cancelled" and is_since(instance, run, resumed_at))


def steps_of(run: dg.DagsterRun) -> set[str]:
    return {key.path[-1] for key in run.asset_selection or ()}


def retry(run: dg.DagsterRun) -> dg.RunRequest:
    """The same work once more: programs go on from what is there, and work that is done is not done again."""
    kept = {tag: run.tags[tag] for tag in (VERSION_TAG, ORGANIZATION_TAG, PREPARATION_TAG) if tag in run.tags}
    return dg.RunRequest(
        run_key=f"retry-{run.run_id}",
        asset_selection=sorted(run.asset_selection or ()),
        partition_key=run.tags.get(PARTITION_TAG),
        tags={**kept, RETRY_OF: run.run_id, RETRIES: str(retries_of(run) + 1)},
    )


def fail_job(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> None:
    """Say of the job of a run that it, or what follows it, failed; unless another run goes on with it."""
    if preparation := run.tags.get(PREPARATION_TAG):
        control_plane.jobs.fail(preparation, f"its run failed: {cause_of(instance, run)}")
        return
    partition, steps = run.tags.get(PARTITION_TAG), steps_of(run)
    if partition is None or not steps & (PROGRAMS | WHAT_FOLLOWS):
        return
    if another_goes_on(instance, run, partition):
        return
    with control_plane.database.read() as connection:
        job = control_plane.jobs.get(partition, connection)
        resumed_at = control_plane.jobs.resumed_at(partition, connection)
    if steps & PROGRAMS:
        # One that failed before its job began has left it queued, and its run key is used up.
        if job.status in ACTIVE and is_since(instance, run, resumed_at) and not is_of_worker(instance, run):
            control_plane.jobs.fail(partition, f"its run failed: {cause_of(instance, run)}")
    elif run.run_id not in job.reason:  # told already: its log is not read at every look
        again = is_one_of(OF_MACHINE, instance, run)
        control_plane.jobs.fail_evaluation(partition, told(cause_of(instance, run), again))


def another_goes_on(instance: dg.DagsterInstance, run: dg.DagsterRun, partition: str) -> bool:
    """Whether a newer run works for the same job, or any other still does."""
    all_of_job = instance.get_runs(dg.RunsFilter(tags={PARTITION_TAG: partition}))
    return all_of_job[0].run_id != run.run_id or any(not each.is_finished for each in all_of_job)


def is_of_worker(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether the program of a job is not to blame that its run failed, and another run may go on with it."""
    return is_one_of(OF_WORKER, instance, run)


def is_one_of(errors: Set[str], instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    return retries_of(run) < MAX_AGAIN and not errors_of(instance, run).isdisjoint(errors)


def failures_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[dg.DagsterEvent]:
    logs = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    return [entry.dagster_event for entry in logs if entry.dagster_event is not None]


def cause_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """The message of the run's first failed step as one line, and where the whole log is."""
    messages = map(failure_message, failures_of(instance, run))
    return f"{next(filter(None, messages), 'its worker died')} (run {run.run_id} in Dagster)"


def errors_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> set[str]:
    """The names of the errors that its steps failed with."""
    errors = [event.step_failure_data.error for event in failures_of(instance, run)]
    return {str((error.cause or error).cls_name) for error in errors if error is not None}


def failure_message(event: dg.DagsterEvent) -> str:
    """What the user's code said: a `Failure` in its own words, any other error by the error that it was wrapped in."""
    data = event.step_failure_data
    if data.user_failure_data is not None and data.user_failure_data.description:
        return " ".join(data.user_failure_data.description.split())
    error = data.error.cause or data.error if data.error is not None else None
    return " ".join(error.message.split()) if error is not None else ""
