"""Training jobs as gangs of pods: results, queueing, and recovery from preemption and kills."""

from collections.abc import Iterator

import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Hardware
from resources.compute.base import Phase
from tests.cluster.cluster import Cluster
from tests.cluster.installation import Installation, wait_until
from tests.cluster.trainings import STEPS, Trained, Trainings, assert_equal, kill_rank, nodes_of, pods_of, train_locally

pytestmark = pytest.mark.cluster

FEW_STEPS = 20
GPUS = Hardware(gpus=8)


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(cluster, "gang", tmp_path_factory.mktemp("installation")) as installation:
        yield installation


@pytest.fixture(scope="module")
def trainings(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings.in_folder(installation, tmp_path_factory.mktemp("trainings"))


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_locally(tmp_path_factory.mktemp("undisturbed"))


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


@pytest.mark.requirement("H3")
def test_gang_waits_whole_until_there_are_nodes_for_all_of_it(installation: Installation, trainings: Trainings) -> None:
    first, second = (trainings.job(name, steps=FEW_STEPS, hardware=GPUS) for name in ("first", "second"))
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


@pytest.mark.requirement("I3", "I5")
def test_preempted_gang_saves_and_resumes_on_other_nodes_to_the_same_weights(
    installation: Installation, trainings: Trainings, undisturbed: Trained
) -> None:
    job = trainings.job("preempted", hardware=GPUS)
    job = job.model_copy(update={"schedule": job.schedule.model_copy(update={"priority": "low"})})
    urgent = trainings.job("urgent", steps=FEW_STEPS, hardware=GPUS)
    urgent = urgent.model_copy(update={"schedule": urgent.schedule.model_copy(update={"priority": "high"})})
    installation.compute.submit(job)
    installation.wait_for_step(job, 20)
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
    assert not attempts[0].counted
    assert first_nodes[0] not in attempts[-1].nodes
    trained = trainings.trained(job)
    assert (trained.resumed_from or 0) >= 20
    assert_equal(trained, undisturbed)


@pytest.mark.requirement("I3")
def test_gang_with_a_killed_rank_restarts_whole_from_its_checkpoint(
    installation: Installation, trainings: Trainings, undisturbed: Trained
) -> None:
    job = trainings.job("killed")
    installation.compute.submit(job)
    installation.wait_for_step(job, 20)
    kill_rank(installation, job)
    installation.wait_for(job, Phase.SUCCEEDED)
    attempts = installation.attempts.list(job)
    assert all(attempt.saved_at is not None for attempt in attempts)
    assert len(attempts) == 2
    trained = trainings.trained(job)
    assert (trained.resumed_from or 0) >= 10
    assert_equal(trained, undisturbed)


def test_job_beyond_its_memory_limit_reports_limit_and_peak(installation: Installation, trainings: Trainings) -> None:
    job = trainings.job("small", hardware=Hardware(memory="150Mi"))
    installation.compute.submit(job)
    ended = installation.wait_for(job, Phase.FAILED, Phase.RESTARTING)
    assert ended.reason is ExitReason.OOM_KILLED
    assert "memory limit of 0.15 GiB, peak 0.15 GiB" in ended.detail
    installation.compute.cancel(job)
