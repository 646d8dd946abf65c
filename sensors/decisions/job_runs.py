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
    """Return the run tag that holds the job's id. A preparation has no partition."""
    return PREPARATION_TAG if job.type == PREPARATION else PARTITION_TAG


def has_no_unfinished_run(instance: dg.DagsterInstance, job_id: str, tag: str = PARTITION_TAG) -> bool:
    """Whether no unfinished run works for a job."""
    return not instance.get_runs(dg.RunsFilter(tags={tag: job_id}, statuses=UNFINISHED), limit=1)


def newest_run(instance: dg.DagsterInstance, job_id: str, resumed_at: int, tag: str = PARTITION_TAG) -> dg.DagsterRun | None:
    """Return the newest run if it began after `resumed_at`, in milliseconds (0: never resumed)."""
    records = instance.get_run_records(dg.RunsFilter(tags={tag: job_id}), limit=1)
    return next((record.dagster_run for record in records if begin_time(record) >= to_datetime(resumed_at)), None)


def began_after(instance: dg.DagsterInstance, run: dg.DagsterRun, resumed_at: int) -> bool:
    """Whether a run began no earlier than `resumed_at`."""
    record = instance.get_run_record_by_id(run.run_id)
    return record is not None and begin_time(record) >= to_datetime(resumed_at)


def begin_time(record: dg.RunRecord) -> datetime:
    """Return when a run started, or was launched if it has not started.

    A run launched in the Dagster UI may be queued while its job is resumed: it then does the resumed work.
    """
    launched: datetime = record.create_timestamp.replace(tzinfo=UTC)
    return max(launched, datetime.fromtimestamp(record.start_time, UTC)) if record.start_time else launched


def to_datetime(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
