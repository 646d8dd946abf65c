"""Find the Dagster runs of a job."""

from datetime import UTC, datetime

import dagster as dg

from hanzo_ml_assets.preparation import PREPARATION_TAG
from resources.metadata.jobs import PREPARATION, JobRecord

PARTITION_TAG, RUN_KEY_TAG, PRIORITY_TAG = "dagster/partition", "dagster/run_key", "dagster/priority"
IN_PROGRESS = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
]
UNFINISHED = [*IN_PROGRESS, dg.DagsterRunStatus.CANCELING]


def job_tag(job: JobRecord) -> str:
    """The run tag with the job's id. A preparation has no partition."""
    return PREPARATION_TAG if job.type == PREPARATION else PARTITION_TAG


def has_no_unfinished_run(instance: dg.DagsterInstance, job_id: str, tag: str = PARTITION_TAG) -> bool:
    """Whether no run works for a job any more."""
    return not instance.get_runs(dg.RunsFilter(tags={tag: job_id}, statuses=UNFINISHED), limit=1)


def newest_run(instance: dg.DagsterInstance, job_id: str, resumed_at: int, tag: str = PARTITION_TAG) -> dg.DagsterRun | None:
    """The newest, where it is of the time since the job was resumed last, in milliseconds; 0 where it never was."""
    records = instance.get_run_records(dg.RunsFilter(tags={tag: job_id}), limit=1)
    return next((record.dagster_run for record in records if begin_time(record) >= to_datetime(resumed_at)), None)


def began_after(instance: dg.DagsterInstance, run: dg.DagsterRun, resumed_at: int) -> bool:
    """Whether a run began to work no earlier than that."""
    record = instance.get_run_record_by_id(run.run_id)
    return record is not None and begin_time(record) >= to_datetime(resumed_at)


def begin_time(record: dg.RunRecord) -> datetime:
    """When a run began to work; of one that did not, when it was launched. One that somebody launched in the Dagster UI may
    stand in the queue while its job is resumed: it then does what the job was resumed for.
    """
    launched: datetime = record.create_timestamp.replace(tzinfo=UTC)
    return max(launched, datetime.fromtimestamp(record.start_time, UTC)) if record.start_time else launched


def to_datetime(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
