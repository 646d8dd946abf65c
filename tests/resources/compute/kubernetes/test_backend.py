"""Supervisor's view of a cluster job: database rows and log segments of all attempts."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import BadConfiguration, Hardware, Job, Program, Result, StoreAddress
from recipes.storage import uris
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.compute.base import Follower, JobFailed, Observation, Phase, Progress
from resources.compute.kubernetes.backend import KubernetesCompute
from resources.compute.kubernetes.gang import base_name
from resources.metadata.cluster_jobs import CANCEL, ClusterJobs, JobState
from resources.metadata.database import Database
from resources.metadata.jobs import Jobs
from resources.settings.scheduler import Scheduler
from tests.resources.compute.kubernetes.jobs import a_job
from tests.support.postgres_server import migrated_sqlite, sqlite_url

__all__ = ["migrated_sqlite", "sqlite_url"]


class Room:
    def __init__(self, database: Database, folder: Path) -> None:
        address = StoreAddress(root=folder.as_uri(), buckets={"datasets": "d", "checkpoints": "c", "models": "m"})
        self.store = Store(address)
        self.database = database
        self.jobs = ClusterJobs(database)
        self.compute = KubernetesCompute(database, self.store, Scheduler(), poll_seconds=0.01)
        self.job = a_job(store=address)
        self.phases: list[Phase] = []
        self.lines: list[str] = []

    def follower(self, *, cancelled: bool = True) -> Follower:
        return Follower(self.lines.append, lambda seen: self.phases.append(seen.phase), lambda: cancelled)

    def set(self, phase: Phase, detail: str = "", reason: ExitReason | None = None, attempt: int = 1) -> None:
        assert self.jobs.set_state(self.jobs.get(self.job), JobState(phase, detail, reason, attempt))

    def log(self, attempt: int, segment: int, text: bytes, rank: int = 0) -> None:
        folder = uris.node_log(self.job.id, self.job.program, attempt, rank)
        self.store.put_bytes(f"{folder}/{segment:06d}.log", text)

    def save_result(self, job: Job | None = None, **uris: str) -> None:
        artifacts = {role: Artifact(kind=role, uri=uri, digest="d" * 64, size_bytes=1) for role, uri in uris.items()}
        result = Result(work_digest=(job or self.job).work_digest, artifacts=artifacts, metrics={"loss": 1.0})
        self.store.put_bytes(self.job.result_uri, result.model_dump_json().encode())


@pytest.fixture
def room(sqlite_url: str, tmp_path: Path) -> Iterator[Room]:
    database = Database(sqlite_url)
    yield Room(database, tmp_path)
    database.close()


def test_submission_is_a_row_for_the_controller(room: Room) -> None:
    room.compute.submit(room.job)
    room.compute.submit(room.job)
    [row] = room.jobs.active()
    assert (row.name, row.namespace, row.generation) == (base_name(room.job), "hanzo-ml", 1)
    assert room.compute.observe(room.job) == Observation(Phase.PENDING, 0)
    assert room.compute.has_processes(room.job)


def submit_record(room: Room, organization: str, id: str) -> None:
    Jobs(room.database).submit(name="j", config={"dataset": "d@1"}, user="ann", organization=organization, id=id)


@pytest.mark.parametrize(
    ("changed", "namespace"),
    [
        ({}, "hanzo-ml-acme"),
        ({"id": "evaluate-job-of-acme", "program": Program.EVALUATE}, "hanzo-ml-acme"),
        ({"id": "convert-job-of-rival", "program": Program.CONVERT}, "hanzo-ml-rival"),
        (
            {"id": "s", "program": Program.SPLIT, "outputs": {"splits": "s3://hanzo-ml/datasets/@rival/d/1"}},
            "hanzo-ml-rival",
        ),
        ({"id": "s", "program": Program.SPLIT, "outputs": {"splits": "s3://hanzo-ml/datasets/d/1"}}, "hanzo-ml"),
    ],
)
def test_job_runs_in_the_namespace_of_its_organization(room: Room, changed: dict[str, Any], namespace: str) -> None:
    submit_record(room, "acme", "job-of-acme")
    submit_record(room, "rival", "job-of-rival")
    room.compute = KubernetesCompute(room.database, room.store, Scheduler(namespace_per_organization=True))
    room.compute.submit(room.job.model_copy(update={"id": "job-of-acme", "inputs": {}, **changed}))
    [row] = room.jobs.active()
    assert row.namespace == namespace


def test_program_belongs_to_its_own_organization_despite_a_matching_job_name(room: Room) -> None:
    submit_record(room, "rival", "7")
    submit_record(room, "acme", "train-7")
    room.compute = KubernetesCompute(room.database, room.store, Scheduler(namespace_per_organization=True))
    room.compute.submit(room.job.model_copy(update={"id": "train-7"}))
    assert room.jobs.active()[0].namespace == "hanzo-ml-acme"


def test_job_that_the_settings_cannot_run_is_refused_without_a_row(room: Room) -> None:
    with pytest.raises(BadConfiguration, match="gpu_type"):
        room.compute.submit(room.job.model_copy(update={"hardware": Hardware(gpu_type="abacus")}))
    assert room.jobs.active() == []


def test_log_has_stable_offsets_over_segments_and_attempts(room: Room) -> None:
    room.compute.submit(room.job)
    assert room.compute.read_log(room.job, 0) == b"" and room.compute.log_size(room.job) == 0
    room.set(Phase.RUNNING, attempt=1)
    room.log(1, 0, b"one\n")
    room.log(1, 0, b"of another node\n", rank=1)
    assert room.compute.read_log(room.job, 0) == b"one\n"
    room.log(1, 1, b"two\nthr")
    assert room.compute.read_lines(room.job, 4) == ("two\n", 8)
    room.set(Phase.RUNNING, attempt=2)
    room.log(2, 0, b"ee\nfour\n")
    assert room.compute.read_log(room.job, 6) == b"o\nthree\nfour\n"
    assert room.compute.read_log(room.job, 9, 4) == b"hree"
    assert room.compute.log_size(room.job) == 19 and room.compute.last_line_end(room.job) == 19
    assert room.compute.read_log(room.job, 500) == b""


def test_run_follows_a_job_to_its_result(room: Room) -> None:
    def advance(seen: Observation) -> None:
        room.phases.append(seen.phase)
        if seen.phase is Phase.PENDING:
            room.set(Phase.RUNNING)
            room.log(1, 0, b"step 1\n")
        elif seen.phase is Phase.RUNNING:
            room.save_result()
            room.log(1, 1, b"step 2\n")
            room.set(Phase.SUCCEEDED, reason=ExitReason.COMPLETED)

    result = room.compute.run(room.job, Follower(room.lines.append, advance))
    assert result.metrics == {"loss": 1.0}
    assert room.lines == ["step 1", "step 2"]
    assert room.phases == [Phase.PENDING, Phase.RUNNING, Phase.SUCCEEDED]


def test_failure_is_given_to_each_supervisor_until_one_has_recorded_it(room: Room) -> None:
    room.compute.submit(room.job)
    room.set(Phase.FAILED, "image x cannot be pulled", ExitReason.BAD_CONFIGURATION)
    for _ in range(2):  # the first report is interrupted before it is recorded
        with pytest.raises(BadConfiguration, match="image x cannot be pulled"):
            room.compute.run(room.job, room.follower())
    assert room.jobs.get(room.job).generation == 1
    room.compute.acknowledge_ends()
    room.compute.acknowledge_ends()
    room.compute.submit(room.job)
    assert room.jobs.get(room.job).generation == 2


@pytest.mark.parametrize("whole_log", [True, False])
def test_only_the_first_supervisor_reports_earlier_log_lines(room: Room, whole_log: bool) -> None:
    room.compute.submit(room.job)
    room.set(Phase.RUNNING)
    room.log(1, 0, b"on the way\n")
    room.set(Phase.FAILED, "exited with 3", ExitReason.PROGRAM_ERROR)
    with pytest.raises(JobFailed):
        room.compute.run(room.job, Follower(room.lines.append, lambda seen: None, whole_log=whole_log))
    assert room.lines == (["on the way"] if whole_log else [])


def test_success_without_a_result_is_a_failure(room: Room) -> None:
    room.compute.submit(room.job)
    room.set(Phase.RUNNING)
    follower = Follower(lambda line: None, lambda seen: room.set(Phase.SUCCEEDED) if seen.phase is Phase.RUNNING else None)
    with pytest.raises(JobFailed, match="without a result"):
        room.compute.run(room.job, follower)


def test_job_whose_result_was_deleted_is_computed_again(room: Room) -> None:
    room.compute.submit(room.job)
    room.set(Phase.SUCCEEDED, reason=ExitReason.COMPLETED)
    room.compute.submit(room.job)
    assert room.jobs.get(room.job).phase is Phase.PENDING


@pytest.mark.parametrize(("cancelled", "wanted"), [(True, CANCEL), (False, "run")])
def test_interrupted_supervisor_cancels_only_for_a_cancelled_run(room: Room, cancelled: bool, wanted: str) -> None:
    def interrupt(seen: Observation) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        room.compute.run(room.job, Follower(room.lines.append, interrupt, lambda: cancelled))
    assert room.jobs.get(room.job).wanted == wanted


def test_queue_time_grows_until_admission(room: Room) -> None:
    assert room.compute.queued_until(room.job) == 0
    room.compute.submit(room.job)
    before = room.jobs.get(room.job).created_at
    assert room.compute.queued_until(room.job) >= before
    room.jobs.set_state(room.jobs.get(room.job), JobState(Phase.RUNNING, admitted_at=7))
    assert room.compute.queued_until(room.job) == 7


def test_terminated_job_has_processes_until_it_has_ended(room: Room) -> None:
    room.compute.submit(room.job)
    room.compute.terminate_processes(room.job)
    assert room.compute.has_processes(room.job)
    room.set(Phase.FAILED, "cancelled", ExitReason.CANCELLED)
    assert not room.compute.has_processes(room.job)


def test_settings_open_the_backend_without_the_client_of_the_cluster(tmp_path: Path) -> None:
    code = (
        "import sys; from resources.compute.backends import open_backend; from resources.settings.settings import Settings\n"
        f"open_backend(Settings.load({{'HANZO_ML_HOME': {str(tmp_path)!r}, 'HANZO_ML_SCHEDULER_BACKEND': 'kubernetes'}}))\n"
        "print({'kubernetes', 'dagster', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stderr


BASE = f"s3://hanzo-models/base/{'a' * 64}"


@pytest.mark.parametrize("below", ["", "/700"])
def test_result_names_outputs_of_its_job_and_its_base_model(room: Room, below: str) -> None:
    output = "s3://hanzo-ml/runs/r/checkpoint-final/adapter"
    room.job = room.job.model_copy(update={"outputs": {"adapter": f"{output}/"}})
    room.save_result(adapter=f"{output}{below}", base=BASE)
    assert room.compute.result(room.job) is not None


@pytest.mark.parametrize(
    "uri",
    [
        "s3://hanzo-ml/runs/another-run/checkpoint-final/adapter",
        "s3://hanzo-models/another/1/safetensors",
        "s3://hanzo-models/base",
        "file:///etc",
    ],
)
def test_result_naming_foreign_artifacts_fails_the_job(room: Room, uri: str) -> None:
    room.compute.submit(room.job)
    room.save_result(adapter=uri)
    room.set(Phase.SUCCEEDED)
    assert room.compute.result(room.job) is None
    with pytest.raises(JobFailed, match="without a result"):
        room.compute._poll(room.job, room.follower(), Progress(0))
