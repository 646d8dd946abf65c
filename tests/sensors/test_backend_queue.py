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
from tests.support.sensors.sensor_house import MODEL, House, house, repository

__all__ = ["house", "repository"]  # fixtures


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
def compute(house: House) -> QueueCompute:
    compute = QueueCompute()
    house.plane.__dict__["compute"] = compute  # where the cached property keeps it
    return compute


def submit(house: House, name: str = "script", organization: str = "default", gpus: int = 0) -> str:
    asked = {"name": name, "command": ["python", "train.py"], "resources": {"gpus": gpus}}
    job = CommandJob.model_validate(asked)
    return submit_command(house.plane.database, house.plane.store, job, "ann", organization).id


def tick(house: House) -> Sequence[str]:
    """Return the run keys of the runs that a tick of the sensor requests."""
    return [str(request.run_key) for request in house.tick(start_submitted_jobs)]


def reason(house: House, job: str) -> str:
    return house.plane.jobs.read(job).reason


def test_queued_job_is_submitted_and_starts_its_run_at_admission(house: House, compute: QueueCompute) -> None:
    job = submit(house)
    assert tick(house) == []
    assert compute.documents[job].program is Program.COMMAND
    assert tick(house) == []
    assert reason(house, job) == "queued: 16 more GPUs needed (position 2)"
    compute.admit(job)
    assert tick(house) == [job]
    assert house.plane.jobs.read(job).status == "queued"  # its run starts it


def test_submitted_document_of_training_equals_that_of_its_asset(house: House, compute: QueueCompute) -> None:
    house.dataset()
    house.submit("job-1")
    assert tick(house) == []
    submitted = compute.documents["job-1"]
    compute.admit("job-1")
    assert tick(house) == ["job-1"]

    house.plane.jobs.start("job-1")  # as its asset does, before it plans the same
    plan = make_training_plan(definition(house), "job-1", house.plane)
    assert training_job(plan, house.plane) == submitted


def definition(house: House) -> ModelDefinition:
    metadata = house.repository.asset_graph.get(dg.AssetKey(["models", MODEL, "checkpoint"])).metadata
    return ModelDefinition(
        name=MODEL,
        dataset=metadata[DATASET_METADATA],
        recipe=metadata[RECIPE_METADATA],
        deployment=DeploymentTarget(smoke_prompts=("Who?",)),
    )


def test_job_that_ended_before_its_run_began_gets_the_run_that_reports_it(house: House, compute: QueueCompute) -> None:
    job = submit(house)
    tick(house)
    compute.admit(job, Phase.FAILED, ExitReason.BAD_CONFIGURATION)
    assert tick(house) == [job]


def test_job_that_cannot_be_planned_fails_with_the_reason(house: House, compute: QueueCompute) -> None:
    house.dataset()
    house.submit("job-1", recipe="no-such-recipe")
    assert tick(house) == []
    job = house.plane.jobs.read("job-1")
    assert job.status == "failed" and "no-such-recipe" in job.reason
    assert compute.documents == {}


def test_job_whose_submission_fails_temporarily_does_not_block_others(house: House, compute: QueueCompute) -> None:
    first, second = submit(house, "first"), submit(house, "second")
    compute.refuses.add(first)
    tick(house)
    assert "ConnectionError: the API server does not answer" in reason(house, first)
    assert set(compute.documents) == {second}
    compute.refuses.clear()
    tick(house)
    assert set(compute.documents) == {first, second}


def test_only_the_job_limit_delays_submission_and_gpus_are_counted_by_the_backend(
    house: House, compute: QueueCompute
) -> None:
    set_quotas(house, "scheduler: {devices: [], quotas: {community: {max_gpus: 8, max_concurrent_jobs: 2}}}")
    house.plane.__dict__["compute"] = compute
    first, second, third = (submit(house, str(number), "community", gpus=8) for number in range(3))
    tick(house)
    assert set(compute.documents) == {first, second}
    assert reason(house, third) == "waits for its organization's quota: 2 of 2 jobs run"
    compute.states[first] = Observation(Phase.SUCCEEDED, 1)
    house.complete(first)
    tick(house)
    assert set(compute.documents) == {first, second, third}


@pytest.mark.requirement("J6", "Z33")
def test_jobs_beyond_the_global_limit_wait_and_queued_jobs_do_not_count(house: House, compute: QueueCompute) -> None:
    set_quotas(house, "scheduler: {devices: [], max_concurrent_jobs: 1}")
    house.plane.__dict__["compute"] = compute
    first, second = submit(house, "first"), submit(house, "second")
    tick(house)
    assert set(compute.documents) == {first, second}
    compute.admit(first)
    third = submit(house, "third")
    assert tick(house) == [first]
    assert third not in compute.documents
    assert reason(house, third) == "waits for its turn: 1 of 1 job run"


def test_resumed_job_is_resubmitted_after_its_previous_submission_ended(house: House, compute: QueueCompute) -> None:
    job = submit(house)
    tick(house)
    compute.admit(job)
    house.plane.jobs.start(job)
    house.plane.jobs.fail(job, "its node was lost")
    compute.admitted_at[job] -= 60_000
    house.plane.jobs.resume(job, ResumeHistory(times=1), {})
    assert tick(house) == []  # the program of its earlier attempt is ended
    assert job not in compute.states
    assert tick(house) == []
    assert compute.states[job].phase is Phase.PENDING
    assert tick(house) == [] and compute.states[job].phase is Phase.PENDING  # it waits, and is not ended again
    compute.admit(job)
    assert tick(house) == [f"{job}-1"]


def test_cancelled_job_leaves_the_queue(house: House, compute: QueueCompute) -> None:
    job = submit(house)
    tick(house)
    house.plane.jobs.cancel(job)
    house.tick(stop_cancelled_jobs)
    assert job not in compute.states
    assert tick(house) == []


# The same on the backend of a cluster, with a test as its controller, which writes rows.


def test_cluster_job_waits_as_a_row_and_starts_its_run_at_admission(house: House) -> None:
    set_quotas(house, "scheduler: {backend: kubernetes}")
    job, rows = submit(house), ClusterJobs(house.plane.database)
    key = JobRef(job, Program.COMMAND)
    assert tick(house) == []
    assert rows.get(key).is_queued
    rows.set_state(rows.get(key), JobState(Phase.PENDING, "quota: 16 more GPUs needed", queue_position=3))
    assert tick(house) == []
    assert reason(house, job) == "quota: 16 more GPUs needed"
    rows.set_state(rows.get(key), JobState(Phase.STARTING, admitted_at=now_ms()))
    assert tick(house) == [job]


def test_cluster_job_that_failed_unwatched_gets_a_run_and_after_its_report_a_new_generation(house: House) -> None:
    set_quotas(house, "scheduler: {backend: kubernetes}")
    job, rows = submit(house), ClusterJobs(house.plane.database)
    key = JobRef(job, Program.COMMAND)
    tick(house)
    rows.set_state(rows.get(key), JobState(Phase.FAILED, "the image is missing", ExitReason.BAD_CONFIGURATION))
    assert tick(house) == [job]
    house.plane.compute.acknowledge_end(key)  # as its run does
    house.plane.jobs.fail(job, "the image is missing")
    house.plane.jobs.resume(job, ResumeHistory(times=1), {})
    assert tick(house) == []
    assert (rows.get(key).generation, rows.get(key).phase) == (2, Phase.PENDING)
    assert tick(house) == [] and rows.get(key).wanted == "run"


def test_resumed_cluster_job_waits_for_the_cancellation_to_finish(house: House) -> None:
    set_quotas(house, "scheduler: {backend: kubernetes}")
    job, rows = submit(house), ClusterJobs(house.plane.database)
    key = JobRef(job, Program.COMMAND)
    tick(house)
    rows.set_state(rows.get(key), JobState(Phase.RUNNING, attempt=1, admitted_at=now_ms() - 60_000))
    house.plane.jobs.start(job)
    house.plane.jobs.cancel(job)
    house.tick(stop_cancelled_jobs)
    assert rows.get(key).wanted == "cancel"
    house.plane.jobs.resume(job, ResumeHistory(times=1), {})
    assert tick(house) == [] and rows.get(key).generation == 1
    assert reason(house, job) == "waits until what ran before it was resumed has ended"
    rows.set_state(rows.get(key), JobState(Phase.FAILED, "cancelled", attempt=1))
    assert tick(house) == [] and rows.get(key).generation == 2


# Programs without a job, such as an evaluation, whose run was cancelled after its worker had died.


def evaluation(house: House, *runs: dg.DagsterRunStatus) -> JobRef:
    """Create an evaluation on the cluster with runs that followed it, oldest first."""
    set_quotas(house, "scheduler: {backend: kubernetes}")
    key, rows = JobRef("evaluate-job-1", Program.EVALUATE), ClusterJobs(house.plane.database)
    house.plane.compute.submit(a_job(id=key.id, program=key.program, store=house.plane.settings.store, tracking=None))
    rows.set_state(rows.get(key), JobState(Phase.RUNNING, attempt=1, admitted_at=now_ms()))
    for status in runs:
        house.instance.add_run(dg.DagsterRun(job_name="__ASSET_JOB", status=status, tags=program_tags(key)))
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
    house: House, runs: tuple[dg.DagsterRunStatus, ...], wanted: str
) -> None:
    key = evaluation(house, *runs)
    house.tick(stop_cancelled_jobs)
    assert ClusterJobs(house.plane.database).get(key).wanted == wanted


def test_resubmitted_job_is_not_cancelled_by_its_earlier_cancelled_run(house: House) -> None:
    """It is queued without a run; its job's state decides about it."""
    set_quotas(house, "scheduler: {backend: kubernetes}")
    job, rows = submit(house), ClusterJobs(house.plane.database)
    key = JobRef(job, Program.COMMAND)
    house.instance.add_run(dg.DagsterRun(job_name="__ASSET_JOB", status=CANCELED, tags=program_tags(key)))
    tick(house)
    house.tick(stop_cancelled_jobs)
    assert rows.get(key).wanted == "run"


def preparation(house: House) -> JobRef:
    """Create a submitted preparation that runs on the cluster."""
    set_quotas(house, "scheduler: {backend: kubernetes}")
    key = JobRef("prepare-1", Program.PREPARE)
    house.plane.jobs.submit(
        name="small",
        config={"dataset": "d"},
        user="ann",
        organization="default",
        id=key.id,
        type=PREPARATION,
        status="running",
    )
    house.plane.compute.submit(a_job(id=key.id, program=key.program, store=house.plane.settings.store, tracking=None))
    return key


def test_cancelled_preparation_is_stopped_after_its_worker_was_lost(house: House) -> None:
    key = preparation(house)
    house.instance.add_run(dg.DagsterRun(job_name="__ASSET_JOB", status=FAILURE, tags={PREPARATION_TAG: key.id}))
    house.tick(stop_cancelled_jobs)
    assert ClusterJobs(house.plane.database).get(key).wanted == "run"
    house.plane.jobs.cancel(key.id)
    house.tick(stop_cancelled_jobs)
    assert ClusterJobs(house.plane.database).get(key).wanted == "cancel"


def test_preparation_is_cancelled_when_its_run_is_terminated_in_dagster(house: House) -> None:
    key = preparation(house)
    house.instance.add_run(dg.DagsterRun(job_name="__ASSET_JOB", status=CANCELED, tags={PREPARATION_TAG: key.id}))
    house.tick(cancel_terminated_jobs)
    assert house.plane.jobs.read(key.id).status == "cancelled"
