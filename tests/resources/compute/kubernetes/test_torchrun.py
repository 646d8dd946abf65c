"""The command of a gang's pods, run for real: two pods as two processes of this machine find each other."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import Distributed
from resources.compute.kubernetes.job_manifest import render
from resources.settings.sections import Scheduler
from tests.resources.compute.kubernetes.jobs import KUEUE, PLAIN, a_job, launched, of_kind, program

GANG = a_job(distributed=Distributed(num_nodes=2, gpus_per_node=1, backend="gloo"))
RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
PROGRAM = """
import os, sys
print(os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1], flush=True)
sys.exit(78)
"""


def value(command: list[str], flag: str) -> str:
    [found] = [word.partition("=")[2] for word in command if word.startswith(f"--{flag}=")]
    return found


def test_every_rank_is_told_its_place_and_where_rank_0_is() -> None:
    rank = {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": RANK}}}
    for scheduler in (KUEUE, PLAIN):
        command = launched(GANG, scheduler)
        assert value(command, "nnodes") == "2" and value(command, "node-rank") == "$(NODE_RANK)"
        assert rank in program(GANG, scheduler)["env"]
        assert command[-3:] == ["-m", "recipes.train", "/job/job.json"]


def test_rank_0_has_the_name_that_the_cluster_gives_it() -> None:
    job_set = of_kind("JobSet", GANG)
    name, network = job_set["metadata"]["name"], job_set["spec"]["network"]
    assert network["enableDNSHostnames"] and network["publishNotReadyAddresses"]
    first = f"{name}-{job_set['spec']['replicatedJobs'][0]['name']}-0-0.{network['subdomain']}"
    assert value(launched(GANG), "master-addr") == first

    service, job = of_kind("Service", GANG, PLAIN), of_kind("Job", GANG, PLAIN)
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert value(launched(GANG, PLAIN), "master-addr") == f"{job['metadata']['name']}-0.{service['metadata']['name']}"


def test_waiting_is_longer_than_the_grace_and_ending_shorter() -> None:
    """A gang that preempts another waits up to 300 s for its room (facts/kubernetes.md, pitfall 1)."""
    command = launched(GANG)
    assert int(value(command, "rdzv-conf").removeprefix("timeout=")) > 300 > int(value(command, "shutdown-timeout")) >= 240


@pytest.mark.slow
def test_two_pods_form_one_world_and_tell_the_exit_code_of_their_program(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "train.py").write_text(PROGRAM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def start(rank: int) -> subprocess.Popen[str]:
        changed: dict[str, Any] = {"--master-addr": "127.0.0.1", "--master-port": port, "--node-rank": rank}
        command = [
            f"{word.partition('=')[0]}={changed[word.partition('=')[0]]}" if word.partition("=")[0] in changed else word
            for word in launched(GANG)[1:]
        ]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)

    pods = [start(0), start(1)]
    told = [pod.communicate(timeout=60) for pod in pods]
    assert sorted(out.strip() for out, _ in told) == ["0 2 /job/job.json", "1 2 /job/job.json"], told
    assert [pod.returncode for pod in pods] == [78, 78], told


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_service_is_there_where_pods_look_for_each_other(num_nodes: int) -> None:
    job = GANG.model_copy(update={"distributed": Distributed(num_nodes=num_nodes)})
    kinds = [item["kind"] for item in render(job, Scheduler(gang_backend="indexed_job"))]
    assert ("Service" in kinds) is (num_nodes > 1)
