"""The Dagster runs that work for a job: they have its id as their partition."""

from datetime import UTC, datetime

import dagster as dg

PARTITION_TAG, RUN_KEY_TAG = "dagster/partition", "dagster/run_key"
IN_PROGRESS = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
]
NOT_GONE = [*IN_PROGRESS, dg.DagsterRunStatus.CANCELING]


def is_gone(instance: dg.DagsterInstance, job_id: str) -> bool:
    """Whether no run works for a job any more."""
    return not instance.get_runs(dg.RunsFilter(tags={PARTITION_TAG: job_id}, statuses=NOT_GONE), limit=1)


def newest_run(instance: dg.DagsterInstance, job_id: str, resumed_at: int) -> dg.DagsterRun | None:
    """Of those since the job was resumed last, at that time in milliseconds; 0 where it never was."""
    filters = dg.RunsFilter(tags={PARTITION_TAG: job_id}, created_after=time_of(resumed_at))
    return next(iter(instance.get_runs(filters, limit=1)), None)


def is_since(instance: dg.DagsterInstance, run: dg.DagsterRun, resumed_at: int) -> bool:
    """Whether a run is no older than that."""
    filters = dg.RunsFilter(run_ids=[run.run_id], created_after=time_of(resumed_at))
    return bool(instance.get_runs(filters, limit=1))


def time_of(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
