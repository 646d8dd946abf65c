"""Rendezvous settings in a gang's manifest, so that its ranks find each other."""

import pytest

from recipes.contracts.job import Distributed
from resources.compute.kubernetes.job_manifest import render
from resources.settings.scheduler import Scheduler
from tests.resources.compute.kubernetes.jobs import BACKENDS, PLAIN, a_job, launched, of_kind, place

GANG = a_job(distributed=Distributed(num_nodes=2, gpus_per_node=1, backend="gloo"))


def value(command: list[str], flag: str) -> str:
    [found] = [word.partition("=")[2] for word in command if word.startswith(f"--{flag}=")]
    return found


def test_every_rank_gets_its_number_and_the_number_of_nodes() -> None:
    for scheduler in BACKENDS.values():
        command = launched(GANG, scheduler, rank=1)
        assert value(command, "nnodes") == "2" and value(command, "node-rank") == "1"
        assert command[-3:] == ["-m", "recipes.train", "/job/job.json"]


def test_rank_0_has_the_name_that_the_cluster_gives_it() -> None:
    job_set = of_kind("JobSet", GANG)
    name, network = job_set["metadata"]["name"], job_set["spec"]["network"]
    assert network["enableDNSHostnames"] and network["publishNotReadyAddresses"]
    first = f"{name}-{job_set['spec']['replicatedJobs'][0]['name']}-0-0.{network['subdomain']}"
    assert value(launched(GANG), "master-addr") == place(GANG).first_host == first

    service, job = of_kind("Service", GANG, PLAIN), of_kind("Job", GANG, PLAIN)
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert value(launched(GANG, PLAIN), "master-addr") == f"{job['metadata']['name']}-0.{service['metadata']['name']}"


def test_rendezvous_timeout_exceeds_the_grace_period_and_shutdown_timeout_does_not() -> None:
    """A gang that preempts another waits up to 300 s for the freed nodes."""
    command = launched(GANG)
    assert int(value(command, "rdzv-conf").removeprefix("timeout=")) > 300 > int(value(command, "shutdown-timeout")) >= 240


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_service_is_rendered_only_for_several_nodes(num_nodes: int) -> None:
    job = GANG.model_copy(update={"distributed": Distributed(num_nodes=num_nodes)})
    kinds = [item["kind"] for item in render(job, Scheduler(gang_backend="indexed_job"))]
    assert ("Service" in kinds) is (num_nodes > 1)
