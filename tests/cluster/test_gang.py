"""Training jobs as gangs of pods: what they compute, how they wait, and what survives a preemption and a kill."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Hardware, Job, Result, Tracking
from recipes.contracts.results import TrainingFacts
from recipes.export.base_model import resolve_base_model
from recipes.storage.artifact_store import Store
from resources.compute.base import Follower, Phase
from resources.compute.local.backend import LocalCompute
from resources.metadata.jobs import Jobs
from tests.cluster.cluster import Cluster
from tests.cluster.installation import Installation, wait_until
from tests.recipes.training.training_workspace import Place
from tests.server_process import ServerProcess

pytestmark = pytest.mark.cluster

STEPS = 40
FULL = {"method": "full", "dtype": "float32", "learning_rate": 1e-3, "batch_size": 2, "max_steps": STEPS}
QUIET = Follower(line=lambda line: None, phase=lambda seen: None)
GPUS = Hardware(gpus=8)


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(cluster, "gang", tmp_path_factory.mktemp("installation")) as installation:
        yield installation


@dataclass(frozen=True)
class Trainings:
    """Makes training jobs of one tiny model, on the cluster or here."""

    installation: Installation
    place: Place

    def job(self, name: str, nodes: int = 2, processes: int = 2, **changed: Any) -> Job:
        shape = {"strategy": "fsdp", "num_nodes": nodes, "gpus_per_node": processes // nodes, "backend": "gloo"}
        record = Jobs(self.installation.database).submit(
            name=name, config={"model": name}, user="tester", organization="default", status="running"
        )
        settings = {**FULL, "distributed": shape}
        job = self.place.job(self.place.folder / record.id, settings)
        distributed = self.place.recipe.changed(settings).distributed
        tracking = Tracking(uri=self.installation.url, run_id=record.id)
        return job.model_copy(update={"distributed": distributed, "tracking": tracking, "hardware": Hardware(), **changed})

    def trained(self, job: Job) -> "Trained":
        result = self.installation.compute.result(job)
        assert result is not None
        return read_trained(result, self.installation.store)


@dataclass(frozen=True)
class Trained:
    """What a training came to, to the last bit: the loss of each step, and the SHA-256 of its weights."""

    losses: dict[int, float | None]
    weights: dict[str, str]
    resumed_from: int | None


def read_trained(result: Result, store: Store) -> Trained:
    facts = TrainingFacts.model_validate(result.facts)
    files = store.manifest(result.artifacts["weights"]).files
    weights = {file.path: file.sha256 for file in files if file.path.endswith(".safetensors")}
    assert weights
    return Trained(facts.losses, weights, facts.resumed_from)


@pytest.fixture(scope="module")
def trainings(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder = tmp_path_factory.mktemp("trainings")
    place = Place(folder, installation.store)
    resolve_base_model(place.recipe.base_model, installation.store, folder)
    return Trainings(installation, place)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The same training by two processes of this machine, which nobody disturbs."""
    folder = tmp_path_factory.mktemp("local")
    place = Place(folder)
    shape = {"strategy": "fsdp", "num_nodes": 1, "gpus_per_node": 2, "backend": "gloo"}
    settings = {**FULL, "distributed": shape}
    job = place.job(folder / "undisturbed", settings)
    with ServerProcess(tmp_path_factory.mktemp("server")) as server:
        made = httpx.post(f"{server.url}/api/2.0/mlflow/runs/create", json={"experiment_id": "0"}).json()
        tracking = Tracking(uri=server.url, run_id=made["run"]["info"]["run_id"])
        distributed = place.recipe.changed(settings).distributed
        job = job.model_copy(update={"distributed": distributed, "tracking": tracking})
        return read_trained(LocalCompute(folder / "jobs").run(job, QUIET), place.store)


def test_gang_on_two_nodes_computes_what_two_local_processes_do(
    installation: Installation, trainings: Trainings, undisturbed: Trained
) -> None:
    job = trainings.job("two-nodes")
    installation.compute.submit(job)
    ended = installation.wait_for(job, Phase.SUCCEEDED)
    assert (ended.attempt, ended.reason) == (1, ExitReason.COMPLETED)
    (attempt,) = installation.attempts.list(job)
    assert len(set(attempt.nodes)) == 2
    assert f"step {STEPS}/{STEPS} loss" in installation.compute.read_log(job, 0).decode()
    assert_equal(trainings.trained(job), undisturbed)
    wait_until(lambda: not pods_of(installation, job), 60, lambda: "its pods are not deleted")


def test_gang_waits_whole_until_there_are_nodes_for_all_of_it(installation: Installation, trainings: Trainings) -> None:
    first, second = (trainings.job(name, hardware=GPUS) for name in ("first", "second"))
    installation.compute.submit(first)
    installation.wait_for(first, Phase.RUNNING)
    installation.compute.submit(second)
    wait_until(lambda: "nvidia.com/gpu" in installation.observe(second).detail, 60, lambda: installation.describe(second))
    waiting = installation.observe(second)
    assert waiting.phase is Phase.PENDING
    assert "8 more needed" in waiting.detail
    assert installation.jobs.get(second).queue_position == 1
    assert not pods_of(installation, second)
    installation.wait_for(first, Phase.SUCCEEDED)
    installation.wait_for(second, Phase.SUCCEEDED)


def test_preempted_gang_saves_and_resumes_on_other_nodes_to_the_same_weights(
    installation: Installation, trainings: Trainings, undisturbed: Trained
) -> None:
    job = trainings.job("preempted", hardware=GPUS)
    job = job.model_copy(update={"schedule": job.schedule.model_copy(update={"priority": "low"})})
    urgent = trainings.job("urgent", hardware=GPUS)
    urgent = urgent.model_copy(update={"schedule": urgent.schedule.model_copy(update={"priority": "high"})})
    installation.compute.submit(job)
    installation.wait_for_step(job, 3)
    first_nodes = nodes_of(installation, job)
    installation.compute.submit(urgent)
    installation.wait_for(job, Phase.SUSPENDED)
    installation.cluster.kubectl("cordon", first_nodes[0])
    try:
        installation.wait_for(urgent, Phase.SUCCEEDED)
        installation.wait_for(job, Phase.SUCCEEDED)
    finally:
        installation.cluster.kubectl("uncordon", first_nodes[0])
    attempts = installation.attempts.list(job)
    assert [attempt.reason for attempt in attempts] == [ExitReason.PREEMPTED, ExitReason.COMPLETED]
    assert not any(attempt.counted for attempt in attempts)
    assert first_nodes[0] not in attempts[-1].nodes
    trained = trainings.trained(job)
    assert (trained.resumed_from or 0) >= 3
    assert_equal(trained, undisturbed)


def test_gang_with_a_killed_rank_restarts_whole_from_its_checkpoint(
    installation: Installation, trainings: Trainings, undisturbed: Trained
) -> None:
    job = trainings.job("killed")
    installation.compute.submit(job)
    installation.wait_for_step(job, 5)
    kill_rank(installation, job)
    installation.wait_for(job, Phase.SUCCEEDED)
    attempts = installation.attempts.list(job)
    assert len(attempts) == 2
    trained = trainings.trained(job)
    assert (trained.resumed_from or 0) >= 2
    assert_equal(trained, undisturbed)


def test_job_that_needs_more_memory_than_it_has_says_so(installation: Installation, trainings: Trainings) -> None:
    job = trainings.job("small", hardware=Hardware(memory="150Mi"))
    installation.compute.submit(job)
    ended = installation.wait_for(job, Phase.FAILED, Phase.RESTARTING)
    assert ended.reason is ExitReason.OOM_KILLED
    assert "150" in ended.detail
    installation.compute.cancel(job)


def assert_equal(trained: Trained, undisturbed: Trained) -> None:
    assert trained.losses == undisturbed.losses
    assert trained.weights == undisturbed.weights


def pods_of(installation: Installation, job: Job) -> list[dict[str, Any]]:
    row = installation.jobs.get(job)
    selector = f"ml.hanzo.ai/job={row.name}"
    found: list[dict[str, Any]] = installation.cluster.get("pods", f"--namespace={row.namespace}", f"--selector={selector}")[
        "items"
    ]
    return found


def nodes_of(installation: Installation, job: Job) -> list[str]:
    return sorted(pod["spec"]["nodeName"] for pod in pods_of(installation, job))


def kill_rank(installation: Installation, job: Job) -> None:
    """Kill one process that trains, as the machine it runs on sees it."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"recipes.train" in words and b"LOCAL_RANK=0" in variables and job.id.encode() in variables:
            os.kill(int(folder.name), signal.SIGKILL)
            return
    raise AssertionError("no process trains")
