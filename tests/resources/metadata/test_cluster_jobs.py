"""Rows of cluster jobs: idempotent submission, and a generation per change or repetition of work."""

import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Hardware, Job, Program, StoreAddress
from resources.compute.base import JobRef, Phase
from resources.metadata.cluster_jobs import CANCEL, ClusterJobs, JobState
from resources.metadata.database import Database

JOB = Job(
    id="run-7",
    program=Program.TRAIN,
    result_uri="s3://hanzo-ml/runs/run-7/train.json",
    store=StoreAddress(root="http://store:9000", buckets={"datasets": "d", "checkpoints": "c", "models": "m"}),
    cache_dir="/work/cache",
)
OTHER_WORK = JOB.model_copy(update={"parameters": {"steps": 2}})
FAILED = JobState(Phase.FAILED, "the image is missing", ExitReason.BAD_CONFIGURATION, attempt=1)


@pytest.fixture
def jobs(database: Database) -> ClusterJobs:
    return ClusterJobs(database)


def submit(jobs: ClusterJobs, job: Job = JOB) -> int:
    return jobs.submit(job, "hanzo-ml", "train-run-7").generation


def test_submission_creates_a_pending_row_that_keeps_the_document(jobs: ClusterJobs) -> None:
    row = jobs.submit(JOB, "hanzo-ml", "train-run-7")
    assert (row.phase, row.generation, row.attempt, row.is_queued) == (Phase.PENDING, 1, 0, True)
    assert jobs.document(JOB) == JOB
    assert jobs.active() == [row] == jobs.list_programs("run-7")


def test_submitting_equal_work_again_attaches(jobs: ClusterJobs) -> None:
    first = jobs.submit(JOB, "hanzo-ml", "train-run-7")
    assert jobs.submit(JOB, "hanzo-ml", "train-run-7") == first


def test_submitting_other_work_begins_a_generation(jobs: ClusterJobs) -> None:
    submit(jobs)
    assert submit(jobs, OTHER_WORK) == 2
    assert jobs.document(JOB) == OTHER_WORK


def test_failure_without_supervisor_is_kept_until_it_was_reported(jobs: ClusterJobs) -> None:
    submit(jobs)
    jobs.set_state(jobs.get(JOB), FAILED)
    assert submit(jobs) == 1
    assert jobs.get(JOB).observation.reason is ExitReason.BAD_CONFIGURATION
    jobs.acknowledge_end(JOB)
    assert submit(jobs) == 2
    row = jobs.get(JOB)
    assert (row.phase, row.reason, row.attempt) == (Phase.PENDING, None, 1)


def test_cancelled_job_starts_again_when_it_is_submitted(jobs: ClusterJobs) -> None:
    submit(jobs)
    jobs.want_cancel(JOB)
    assert jobs.get(JOB).wanted == CANCEL
    assert submit(jobs) == 2
    assert jobs.get(JOB).wanted == "run"


def test_state_of_an_earlier_generation_or_ended_job_is_not_written(jobs: ClusterJobs) -> None:
    submit(jobs)
    earlier = jobs.get(JOB)
    submit(jobs, OTHER_WORK)
    assert not jobs.set_state(earlier, FAILED)
    assert jobs.set_state(jobs.get(JOB), FAILED)
    assert not jobs.set_state(jobs.get(JOB), JobState(Phase.RUNNING))
    assert jobs.get(JOB).phase is Phase.FAILED
    assert jobs.active() == [] and jobs.count_active() == 0


def test_restart_with_fewer_nodes_keeps_submission_time_and_attempts(jobs: ClusterJobs) -> None:
    submit(jobs)
    jobs.set_state(jobs.get(JOB), JobState(Phase.SUSPENDED, attempt=3))
    before = jobs.get(JOB)
    smaller = JOB.model_copy(update={"hardware": Hardware(cpu=1)})
    assert jobs.restart(smaller, before.generation)
    assert not jobs.restart(smaller, before.generation)
    after = jobs.get(JOB)
    assert (after.generation, after.attempt, after.created_at) == (2, 3, before.created_at)
    assert jobs.document(JOB).hardware.cpu == 1


def test_programs_of_one_job_are_separate(jobs: ClusterJobs) -> None:
    submit(jobs)
    jobs.submit(JOB.model_copy(update={"program": Program.EVALUATE}), "hanzo-ml", "evaluate-run-7")
    jobs.want_cancel(JobRef("run-7", Program.EVALUATE))
    assert [row.wanted for row in jobs.list_programs("run-7")] == ["run", CANCEL]


def test_unknown_job_is_not_found(jobs: ClusterJobs) -> None:
    assert jobs.find(JobRef("nobody", Program.TRAIN)) is None
    with pytest.raises(FileNotFoundError, match="never submitted"):
        jobs.document(JobRef("nobody", Program.TRAIN))
