"""What becomes of a run that failed by an error: it is tried again where the machine is to blame, else its job is told.

That is decided once, and kept as a tag of the run: its log is read for it, and looks come every few seconds.
"""

from collections.abc import Set
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.preparation import PREPARATION_TAG
from resources.errors import HanzoError
from resources.metadata.jobs import ACTIVE, JobRecord
from resources.metadata.sweeps import SWEEP_KEY
from sensors.failures import Failure, read_failure
from sensors.retries import another_goes_on, retries_of, steps_of
from sensors.runs_of_jobs import PARTITION_TAG, is_since

AGAIN_TAG = "hanzo_ml/again"
"""Run tag with what was decided, YES or NO, and of which run: one that is launched again in the Dagster UI has it too."""
YES, NO = "yes", "no"
PROGRAMS = {"checkpoint", "command"}
"""Assets whose runs work for a job; those of others only for what it has left."""
WHAT_FOLLOWS = {"evaluation", "version", "merged", "gguf"}
DATASETS = "datasets"
"""Begins the keys of the assets that check, split and prepare."""
MAX_AGAIN = 5
AGAIN = ", which is tried again"
OF_STORE = {"StoreUnavailable", "StoreFull", "NoStore"}
"""Not of one that refuses: a sweep whose keys were wrong waited for that until it was cancelled, and had said nothing."""
OF_WORKER = OF_STORE | {
    "StoreRefuses",
    "RefusedByStore",
    "OperationalError",
    "InterfaceError",
    "TimeoutError",
    "DagsterPostgresException",
    "MemoryError",
}
"""Errors of whoever follows a program. Store or database were away as it began, or recorded the end: a training of weeks had
failed for that, which went on or was over. And one of programs: while a store was full, or could only be read, a sweep lost
all of its trials, one after the other, and nobody can resume a trial.
"""
OF_MACHINE = OF_WORKER | {"MachineFailed"}
"""Errors for which neither the user nor what was trained is to blame."""
LOOK_BACK = timedelta(days=7)
"""How long ago a run may have failed that is looked at: for as long the stack may have been down."""


def is_tried_again(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """What was decided of a run, or is now. Its job is told before the run is tagged: whoever is killed between tells it
    once more, which changes nothing.
    """
    if known := decided(run):
        return known == YES
    if another_goes_on(instance, run):
        return False  # as that one ends is not known yet
    again = False
    with suppress(HanzoError):  # the job is no more: it is no reason to leave the others
        again = decide(instance, run, control_plane)
    instance.add_run_tags(run.run_id, {AGAIN_TAG: f"{YES if again else NO} {run.run_id}"})
    return again


def decided(run: dg.DagsterRun) -> str:
    """YES or NO; nothing, where it is still to be decided of this run. Before there were ids in the tag, it was of any."""
    found, _, of = str(run.tags.get(AGAIN_TAG, "")).partition(" ")
    return found if of in ("", run.run_id) else ""


def is_given_up(record: dg.RunRecord, now: datetime) -> bool:
    """Whether nobody tries the work of a failed run again; not where that is still to be decided."""
    if now - record.update_timestamp.replace(tzinfo=UTC) > LOOK_BACK:
        return True
    return decided(record.dagster_run) == NO


def decide(instance: dg.DagsterInstance, run: dg.DagsterRun, control_plane: ControlPlane) -> bool:
    """Whether a run is tried again; its job is told where it is not, or where that has ended already.

    Raises:
        HanzoError: the job is no more.
    """
    partition, steps = run.tags.get(PARTITION_TAG), steps_of(run)
    if preparation := run.tags.get(PREPARATION_TAG):
        return decide_of_job(instance, run, preparation, OF_MACHINE, control_plane)
    if partition is not None and steps & PROGRAMS:
        return decide_of_job(instance, run, partition, OF_WORKER, control_plane)
    if partition is not None and steps & WHAT_FOLLOWS:
        failure = read_failure(instance, run)
        again = steps <= WHAT_FOLLOWS and may_try_again(run, failure, OF_MACHINE)
        told = f"what follows its training failed: {failure.cause}{AGAIN if again else ''}"
        control_plane.jobs.fail_evaluation(partition, told)
        return again
    of_data = bool(run.asset_selection) and all(key.path[0] == DATASETS for key in run.asset_selection)
    return of_data and may_try_again(run, read_failure(instance, run), OF_MACHINE)


def decide_of_job(
    instance: dg.DagsterInstance, run: dg.DagsterRun, job_id: str, blameless: Set[str], control_plane: ControlPlane
) -> bool:
    """Of a run that works for a job: that fails where the run is not tried again.

    One that failed before its job began has left it queued, and its run key is used up.
    """
    with control_plane.database.read() as connection:
        job = control_plane.jobs.get(job_id, connection)
        resumed_at = control_plane.jobs.resumed_at(job_id, connection)
    if job.status not in ACTIVE or not is_since(instance, run, resumed_at):
        return False
    failure = read_failure(instance, run)
    again = may_try_again(run, failure, blameless) or waits_for_store(job, failure)
    if again and steps_of(run) & PROGRAMS:  # until its program is followed again, which tells for what that waits
        control_plane.jobs.wait_for(job_id, f"its run failed: {failure.cause}{AGAIN}", "running")
    if not again:
        control_plane.jobs.fail(job_id, f"its run failed: {failure.cause}")
    return again


def may_try_again(run: dg.DagsterRun, failure: Failure, blameless: Set[str]) -> bool:
    return retries_of(run) < MAX_AGAIN and not failure.errors.isdisjoint(blameless)


def waits_for_store(job: JobRecord, failure: Failure) -> bool:
    """Whether a trial waits for its store, in its place, for as long as that takes: it can be cancelled with its sweep, and
    not be resumed once it has failed. A sweep lost all of its trials so to a store that was away for a few hours.
    """
    return SWEEP_KEY in job.config and not failure.errors.isdisjoint(OF_STORE)
