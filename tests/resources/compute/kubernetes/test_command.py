"""User commands on a cluster: their image, and defaults added to their torchrun."""

import sys

import pytest

from recipes.contracts.job import Distributed, Hardware, Program
from resources.compute.kubernetes.job_manifest import render
from resources.settings.scheduler import Scheduler
from tests.resources.compute.kubernetes.jobs import (
    BACKENDS,
    COMMAND,
    JOBS,
    KUEUE,
    a_job,
    launched,
    of_kind,
    program,
    variables,
)


@pytest.mark.requirement("H8", "Z24")
@pytest.mark.parametrize("scheduler", BACKENDS.values(), ids=BACKENDS)
def test_command_runs_in_every_pod_with_the_variables_of_torchrun(scheduler: Scheduler) -> None:
    job = JOBS["a command on four nodes"]
    container = program(job, scheduler)
    assert container["image"] == "me/mine:1"
    assert launched(job, scheduler) == [sys.executable, "-m", "recipes.command", "/job/job.json"]
    found = variables(job, scheduler)
    assert (found["PET_NNODES"], found["PET_NPROC_PER_NODE"], found["PET_MASTER_PORT"]) == ("4", "8", "29500")
    assert found["PET_MASTER_ADDR"] == found["HANZO_ML_RANK_0"]
    assert found["HANZO_ML_PROCESSES"] == "0", "the command starts torchrun itself"
    assert found["PET_NODE_RANK"] == found["NODE_RANK"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_command_without_a_shape_gets_no_variables_and_the_default_image() -> None:
    script = {"command": ["python", "train.py"]}
    job = a_job(program=Program.COMMAND, parameters={**COMMAND, "script": script})
    assert program(job)["image"] == KUEUE.default_image
    assert not [name for name in variables(job) if name.startswith(("PET_", "HF_", "TQDM_"))]


def test_command_arguments_and_variables_are_in_the_job_document() -> None:
    text = of_kind("ConfigMap", JOBS["a command"])["data"]["job.json"]
    assert '"--nproc_per_node=8"' in text and '"COLOUR": "grey"' in text


def test_command_requests_hardware_like_any_job() -> None:
    job = a_job(
        program=Program.COMMAND,
        parameters=COMMAND,
        hardware=Hardware(gpus=8, gpu_type="nvidia-a100-80gb"),
        distributed=Distributed(),
    )
    kinds = [item["kind"] for item in render(job, KUEUE)]
    assert kinds == ["ConfigMap", "Secret", "JobSet"]
