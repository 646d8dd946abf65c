"""Jobs of a backend with its own queue: submitted by the sensor, run once admitted."""

from collections.abc import Sequence

import dagster as dg
import pytest

from hanzo_ml_assets.definition_schema import DeploymentTarget, ModelDefinition
from hanzo_ml_assets.preparation import PREPARATION_TAG
from hanzo_ml_assets.supervisor import program_tags
from hanzo_ml_assets.training import DATASET_METADATA, RECIPE_METADATA
from hanzo_ml_assets.training_plan import make_training_plan, training_job
from recipes.contracts.command_job import CommandJob
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Job, Program
from resources.compute.base import Compute, JobKey, JobRef, Observation, Phase
from resources.jobs.command import submit_command
from resources.metadata.cluster_jobs import ClusterJobs, JobState
from resources.metadata.job_record import ResumeHistory
from resources.metadata.jobs import PREPARATION
from resources.metadata.outbox import now_ms
from sensors.cancel_terminated_jobs import cancel_terminated_jobs
from sensors.start_submitted_jobs import start_submitted_jobs
from sensors.stop_cancelled_jobs import stop_cancelled_jobs
from tests.resources.compute.kubernetes.jobs import a_job
from tests.support.sensors.job_quota import set_quotas
from tests.support.sensors.sensor_harness import MODEL, SensorHarness, harness, repository

__all__ = ["harness", "repository"]  # fixtures


class QueueCompute(Compute):
    """A backend whose queue is a dictionary: a test admits its jobs."""

    queues_jobs = True

    def __init__(self) -> None:
        super().__init__()
        self.documents: dict[str, Job] = {}
        self.states: dict[str, Observation] = {}
        self.admitted_at: dict[str, int] = {}
        self.refuses: set[str] = set()

    def submit(self, job: Job) -> None:
        if job.id in self.refuses:
            raise ConnectionError("the API server does not answer")
        self.documents[job.id] = job
        self.states.setdefault(job.id, Observation(Phase.PENDING, 0, "queued: 16 more GPUs needed (position 2)"))

    def admit(self, job_id: str, phase: Phase = Phase.STARTING, reason: ExitReason | None = None) -> None:
        self.states[job_id] = Observation(phase, 1, "pulling the image", reason)
        self.admitted_at[job_id] = now_ms()

    def observe(self, job: JobKey) -> Observation:
        if job.id not in self.states:
            raise FileNotFoundError(job.id)
        return self.states[job.id]

    def cancel(self, job: JobKey) -> None:
        self.states.pop(job.id, None)

    def read_log(self, job: JobKey, offset: int, max_bytes: int | None = None) -> bytes:
        return b""

    def log_size(self, job: JobKey) -> int:
        return 0

    def has_processes(self, job: JobKey) -> bool:
        state = self.states.get(job.id)
        return state is not None and state.phase not in (Phase.SUCCEEDED, Phase.FAILED)

    def terminate_processes(self, job: JobKey) -> None:
        self.cancel(job)

    def queued_until(self, job: JobKey) -> int:
        state = self.states.get(job.id)
        if state is None:
            return 0
        return now_ms() if state.phase is Phase.PENDING else self.admitted_at[job.id]


@pytest.fixture
def compute(harness: SensorHarness) -> QueueCompute:
    compute = QueueCompute()
    harness.plane.__dict__["compute"] = compute  # where the cached property keeps it
    return compute


def submit(harness: SensorHarness, name: str = "script", organization: str = "default", gpus: int = 0) -> str:
    asked = {"name": name, "command": ["python", "train.py"], "resources": {"gpus": gpus}}
    job = CommandJob.model_validate(asked)
    return submit_command(harness.plane.database, harness.plane.store, job, "ann", organization).id


def tick(harness: SensorHarness) -> Sequence[str]:
    """Return the run keys of the runs that a tick of the sensor requests."""
    return [str(request.run_key) for request in harness.tick(start_submitted_jobs)]


def reason(harness: SensorHarness, job: str) -> str:
    return harness.plane.jobs.read(job).reason


def test_queued_job_is_submitted_and_starts_its_run_at_admission(harness: SensorHarness, compute: QueueCompute) -> None:
    job = submit(harness)
    assert tick(harness) == []
    assert compute.documents[job].program is Program.COMMAND
    assert tick(harness) == []
    assert reason(harness, job) == "queued: 16 more GPUs needed (position 2)"
    compute.admit(job)
    assert tick(harness) == [job]
    assert harness.plane.jobs.read(job).status == "queued"  # its run starts it


def test_submitted_document_of_training_equals_that_of_its_asset(harness: SensorHarness, compute: QueueCompute) -> None:
    harness.dataset()
    harness.submit("job-1")
    assert tick(harness) == []
    submitted = compute.documents["job-1"]
    compute.admit("job-1")
    assert tick(harness) == ["job-1"]

    harness.plane.jobs.start("job-1")  # as its asset does, before it plans the same
    plan = make_training_plan(definition(harness), "job-1", harness.plane)
    assert training_job(plan, harness.plane) == submitted


def definition(harness: SensorHarness) -> ModelDefinition:
    metadata = harness.repository.asset_graph.get(dg.AssetKey(["models", MODEL, "checkpoint"])).metadata
    return ModelDefinition(
        name=MODEL,
        dataset=metadata[DATASET_METADATA],
        recipe=metadata[RECIPE_METADATA],
        deployment=DeploymentTarget(smoke_prompts=("Who?",)),
    )


def test_job_that_ended_before_its_run_began_gets_the_run_that_reports_it(
    harness: SensorHarness, compute: QueueCompute
) -> None:
    job = submit(harness)
    tick(harness)
    compute.admit(job, Phase.FAILED, ExitReason.BAD_CONFIGURATION)
    assert tick(harness) == [job]


def test_job_that_cannot_be_planned_fails_with_the_reason(harness: SensorHarness, compute: QueueCompute) -> None:
    harness.dataset()
    harness.submit("job-1", recipe="no-such-recipe")
    assert tick(harness) == []
    job = harness.plane.jobs.read("job-1")
    assert job.status == "failed" and "no-such-recipe" in job.reason
    assert compute.documents == {}


def test_job_whose_submission_fails_temporarily_does_not_block_others(harness: SensorHarness, compute: QueueCompute) -> None:
    first, second = submit(harness, "first"), submit(harness, "second")
    compute.refuses.add(first)
    tick(harness)
    assert "ConnectionError: the API server does not answer" in reason(harness, first)
    assert set(compute.documents) == {second}
    compute.refuses.clear()
    tick(harness)
    assert set(compute.documents) == {first, second}


def test_only_the_job_limit_delays_submission_and_gpus_are_counted_by_the_backend(
    harness: SensorHarness, compute: QueueCompute
) -> None:
    set_quotas(harness, "scheduler: {devices: [], quotas: {community: {max_gpus: 8, max_concurrent_jobs: 2}}}")
    harness.plane.__dict__["compute"] = compute
    first, second, third = (submit(harness, str(number), "community", gpus=8) for number in range(3))
    tick(harness)
    assert set(compute.documents) == {first, second}
    assert reason(harness, third) == "waits for its organization's quota: 2 of 2 jobs run"
    compute.states[first] = Observation(Phase.SUCCEEDED, 1)
    harness.complete(first)
    tick(harness)
    assert set(compute.documents) == {first, second, third}


@pytest.mark.requirement("J6", "Z33")
def test_jobs_beyond_the_global_limit_wait_and_queued_jobs_do_not_count(
    harness: SensorHarness, compute: QueueCompute
) -> None:
    set_quotas(harness, "scheduler: {devices: [], max_concurrent_jobs: 1}")
    harness.plane.__dict__["compute"] = compute
    first, second = submit(harness, "first"), submit(harness, "second")
    tick(harness)
    assert set(compute.documents) == {first, second}
    compute.admit(first)
    third = submit(harness, "third")
    assert tick(harness) == [first]
    assert third not in compute.documents
    assert reason(harness, third) == "waits for its turn: 1 of 1 job run"


def test_resumed_job_is_resubmitted_after_its_previous_submission_ended(
    harness: SensorHarness, compute: QueueCompute
) -> None:
    job = submit(harness)
    tick(harness)
    compute.admit(job)
    harness.plane.jobs.start(job)
    harness.plane.jobs.fail(job, "its node was lost")
    compute.admitted_at[job] -= 60_000
    harness.plane.jobs.resume(job, ResumeHistory(times=1), {})
    assert tick(harness) == []  # the program of its earlier attempt is ended
    assert job not in compute.states
    assert tick(harness) == []
    assert compute.states[job].phase is Phase.PENDING
    assert tick(harness) == [] and compute.states[job].phase is Phase.PENDING  # it waits, and is not ended again
    compute.admit(job)
    assert tick(harness) == [f"{job}-1"]


def test_cancelled_job_leaves_the_queue(harness: SensorHarness, compute: QueueCompute) -> None:
    job = submit(harness)
    tick(harness)
    harness.plane.jobs.cancel(job)
    harness.tick(stop_cancelled_jobs)
    assert job not in compute.states
    assert tick(harness) == []


# The same on the backend of a cluster, with a test as its controller, which writes rows.


def test_cluster_job_waits_as_a_row_and_starts_its_run_at_admission(harness: SensorHarness) -> None:
    set_quotas(harness, "scheduler: {backend: kubernetes}")
    job, rows = submit(harness), ClusterJobs(harness.plane.database)
    key = JobRef(job, Program.COMMAND)
    assert tick(harness) == []
    assert rows.get(key).is_queued
    rows.set_state(rows.get(key), JobState(Phase.PENDING, "quota: 16 more GPUs needed", queue_position=3))
    assert tick(harness) == []
    assert reason(harness, job) == "quota: 16 more GPUs needed"
    rows.set_state(rows.get(key), JobState(Phase.STARTING, admitted_at=now_ms()))
    assert tick(harness) == [job]


def test_cluster_job_that_failed_unwatched_gets_a_run_and_after_its_report_a_new_generation(harness: SensorHarness) -> None:
    set_quotas(harness, "scheduler: {backend: kubernetes}")
    job, rows = submit(harness), ClusterJobs(harness.plane.database)
    key = JobRef(job, Program.COMMAND)
    tick(harness)
    rows.set_state(rows.get(key), JobState(Phase.FAILED, "the image is missing", ExitReason.BAD_CONFIGURATION))
    assert tick(harness) == [job]
    harness.plane.compute.acknowledge_end(key)  # as its run does
    harness.plane.jobs.fail(job, "the image is missing")
    harness.plane.jobs.resume(job, ResumeHistory(times=1), {})
    assert tick(harness) == []
    assert (rows.get(key).generation, rows.get(key).phase) == (2, Phase.PENDING)
    assert tick(harness) == [] and rows.get(key).wanted == "run"


def test_resumed_cluster_job_waits_for_the_cancellation_to_finish(harness: SensorHarness) -> None:
    set_quotas(harness, "scheduler: {backend: kubernetes}")
    job, rows = submit(harness), ClusterJobs(harness.plane.database)
    key = JobRef(job, Program.COMMAND)
    tick(harness)
    rows.set_state(rows.get(key), JobState(Phase.RUNNING, attempt=1, admitted_at=now_ms() - 60_000))
    harness.plane.jobs.start(job)
    harness.plane.jobs.cancel(job)
    harness.tick(stop_cancelled_jobs)
    assert rows.get(key).wanted == "cancel"
    harness.plane.jobs.resume(job, ResumeHistory(times=1), {})
    assert tick(harness) == [] and rows.get(key).generation == 1
    assert reason(harness, job) == "waits until what ran before it was resumed has ended"
    rows.set_state(rows.get(key), JobState(Phase.FAILED, "cancelled", attempt=1))
    assert tick(harness) == [] and rows.get(key).generation == 2


# Programs without a job, such as an evaluation, whose run was cancelled after its worker had died.


def evaluation(harness: SensorHarness, *runs: dg.DagsterRunStatus) -> JobRef:
    """Create an evaluation on the cluster with runs that followed it, oldest first."""
    set_quotas(harness, "scheduler: {backend: kubernetes}")
    key, rows = JobRef("evaluate-job-1", Program.EVALUATE), ClusterJobs(harness.plane.database)
    harness.plane.compute.submit(a_job(id=key.id, program=key.program, store=harness.plane.settings.store, tracking=None))
    rows.set_state(rows.get(key), JobState(Phase.RUNNING, attempt=1, admitted_at=now_ms()))
    for status in runs:
        harness.instance.add_run(dg.DagsterRun(job_name="__ASSET_JOB", status=status, tags=program_tags(key)))
    return key


STARTED, FAILURE = dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.FAILURE
CANCELING, CANCELED = dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED


@pytest.mark.parametrize(
    ("runs", "wanted"),
    [
        ((CANCELED,), "cancel"),
        ((FAILURE, CANCELED), "cancel"),
        ((CANCELING,), "run"),
        ((FAILURE,), "run"),
        ((CANCELED, FAILURE), "run"),
        ((STARTED, CANCELED), "run"),
        ((), "run"),
    ],
)
def test_evaluation_is_cancelled_only_when_its_latest_run_was_cancelled_and_none_is_active(
    harness: SensorHarness, runs: tuple[dg.DagsterRunStatus, ...], wanted: str
) -> None:
    key = evaluation(harness, *runs)
    harness.tick(stop_cancelled_jobs)
    assert ClusterJobs(harness.plane.database).get(key).wanted == wanted


def test_resubmitted_job_is_not_cancelled_by_its_earlier_cancelled_run(harness: SensorHarness) -> None:
    """It is queued without a run; its job's state decides about it."""
    set_quotas(harness, "scheduler: {backend: kubernetes}")
    job, rows = submit(harness), ClusterJobs(harness.plane.database)
    key = JobRef(job, Program.COMMAND)
    harness.instance.add_run(dg.DagsterRun(job_name="__ASSET_JOB", status=CANCELED, tags=program_tags(key)))
    tick(harness)
    harness.tick(stop_cancelled_jobs)
    assert rows.get(key).wanted == "run"


def preparation(harness: SensorHarness) -> JobRef:
    """Create a submitted preparation that runs on the cluster."""
    set_quotas(harness, "scheduler: {backend: kubernetes}")
    key = JobRef("prepare-1", Program.PREPARE)
    harness.plane.jobs.submit(
        name="small",
        config={"dataset": "d"},
        user="ann",
        organization="default",
        id=key.id,
        type=PREPARATION,
        status="running",
    )
    harness.plane.compute.submit(a_job(id=key.id, program=key.program, store=harness.plane.settings.store, tracking=None))
    return key


def test_cancelled_preparation_is_stopped_after_its_worker_was_lost(harness: SensorHarness) -> None:
    key = preparation(harness)
    harness.instance.add_run(dg.DagsterRun(job_name="__ASSET_JOB", status=FAILURE, tags={PREPARATION_TAG: key.id}))
    harness.tick(stop_cancelled_jobs)
    assert ClusterJobs(harness.plane.database).get(key).wanted == "run"
    harness.plane.jobs.cancel(key.id)
    harness.tick(stop_cancelled_jobs)
    assert ClusterJobs(harness.plane.database).get(key).wanted == "cancel"


def test_preparation_is_cancelled_when_its_run_is_terminated_in_dagster(harness: SensorHarness) -> None:
    key = preparation(harness)
    harness.instance.add_run(dg.DagsterRun(job_name="__ASSET_JOB", status=CANCELED, tags={PREPARATION_TAG: key.id}))
    harness.tick(cancel_terminated_jobs)
    assert harness.plane.jobs.read(key.id).status == "cancelled"
