"""Elastic jobs run on fewer nodes when not all are available.

They process the same samples in the same order.
"""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Hardware, Job, Schedule
from recipes.contracts.pod_settings import PodSettings
from resources.compute.base import Phase
from resources.compute.kubernetes.gang import object_name
from resources.compute.kubernetes.gangs.kueue import MAX_SECONDS_LABEL
from resources.jobs.resume import LOSS_METRIC
from resources.metadata.tracking.metrics import Metrics
from tests.cluster.cluster import Cluster
from tests.cluster.installation import Installation, wait_until
from tests.cluster.trainings import Trainings, pods_of, train_locally
from tests.cluster.urgent_work import urgent_work

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow, pytest.mark.requirement("I10")]

STEPS = 120
LABEL = f"elastic.example.com/{uuid4().hex[:6]}"
"""Label of nodes that the job may use: removing it is the loss of that node, for this job alone."""
HOURS = 3600


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(cluster, "elastic", tmp_path_factory.mktemp("installation"), gpus=24) as installation:
        cluster.kubectl("label", "nodes", "--all", f"{LABEL}=yes")
        try:
            yield installation
        finally:
            cluster.kubectl("label", "nodes", "--all", f"{LABEL}-")


@pytest.mark.timeout(1800)
def test_job_continues_on_fewer_nodes_with_the_same_samples_after_node_loss_and_preemption(
    installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trainings = Trainings.in_folder(installation, tmp_path_factory.mktemp("trainings"))
    shape = {"strategy": "fsdp", "num_nodes": 3, "gpus_per_node": 1, "backend": "gloo"}
    elastic = {"elastic": {"min_nodes": 1, "wait": "5s"}}
    job = trainings.job(
        "elastic",
        nodes=3,
        processes=3,
        steps=STEPS,
        recipe={"distributed": shape | elastic},
        hardware=Hardware(gpus=8),
        schedule=Schedule(priority="low", max_duration="2h", retries=0),
        pod=PodSettings(node_selector={LABEL: "yes"}),
    )
    installation.compute.submit(job)
    installation.wait_for_step(job, 20)
    assert max_seconds(installation, job) == 2 * HOURS
    lose_node(installation, job)
    wait_for_generation(installation, job, 2)
    installation.wait_for_step(job, installation.last_step(job) + 10)
    with urgent_work(installation, gpus=8, pods=2):
        wait_for_generation(installation, job, 3)
        assert max_seconds(installation, job) < 2 * HOURS
        installation.wait_for(job, Phase.SUCCEEDED)
    *interrupted, last = installation.attempts.list(job)
    complete = [attempt for attempt in (*interrupted, last) if attempt.is_registered]
    assert [(attempt.generation, len(set(attempt.nodes))) for attempt in complete] == [(1, 3), (2, 2), (3, 1)]
    assert {attempt.reason for attempt in interrupted} <= {ExitReason.PREEMPTED, ExitReason.NODE_LOST}
    assert not any(attempt.counted for attempt in interrupted)
    undisturbed = train_locally(
        tmp_path_factory.mktemp("undisturbed"),
        {"max_steps": STEPS, "distributed": shape | {"num_nodes": 1, "gpus_per_node": 3}},
    )
    # Other process counts sum in another order; other samples would differ in the first digits.
    assert trainings.trained(job).losses == pytest.approx(undisturbed.losses, rel=1e-3)
    assert job.tracking is not None
    logged = Metrics(installation.database).history(job.tracking.run_id, LOSS_METRIC, limit=2 * STEPS).points
    assert [point.step for point in logged] == list(range(1, STEPS + 1))


def lose_node(installation: Installation, job: Job) -> None:
    """Evict the job's pod from one node, which accepts no others of it any more."""
    pod = pods_of(installation, job)[1]
    installation.cluster.kubectl("label", "node", pod["spec"]["nodeName"], f"{LABEL}-")
    installation.cluster.kubectl(
        "delete", "pod", pod["metadata"]["name"], f"--namespace={installation.name}", "--wait=false"
    )


def wait_for_generation(installation: Installation, job: Job, generation: int) -> None:
    wait_until(lambda: installation.jobs.get(job).generation == generation, 300, lambda: installation.describe(job))
    installation.wait_for(job, Phase.RUNNING)


def max_seconds(installation: Installation, job: Job) -> int:
    """Return what Kueue gives the newest generation of the job."""
    name = object_name(job, installation.jobs.get(job).generation)
    labels = installation.cluster.get("jobset", name, f"--namespace={installation.name}")["metadata"]["labels"]
    return int(labels[MAX_SECONDS_LABEL])
