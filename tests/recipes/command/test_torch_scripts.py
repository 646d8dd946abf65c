"""Torch scripts under the program `command`: the specification's example and torchrun's workers."""

import os
import signal
import threading

import pytest

from recipes.job_processes import PROC_FOLDER, find_job_processes
from recipes.machine import read_machine
from resources.compute.base import JobFailed
from resources.compute.local.backend import LocalCompute
from tests.support.recipes.command_program import ID, CommandJobs, commands, compute, until

__all__ = ["commands", "compute"]  # fixtures

pytestmark = pytest.mark.skipif(bool(read_machine().gpus), reason="of a machine without a GPU, which this one has")
TWO = ["torchrun", "--nproc_per_node=2", "main.py"]
TOGETHER = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
"""


@pytest.mark.requirement("H6")
def test_cuda_calls_run_on_cpu_without_a_gpu(compute: LocalCompute, commands: CommandJobs) -> None:
    script = """
import importlib.util
importlib.util.find_spec("torch")  # as libraries do that would like to know whether it is there
import torch
from torch import nn
for made in (torch.ones(2).to(0), torch.ones(2).to("cuda:1"), torch.ones(2).cuda(), torch.ones(2).to(device="cuda")):
    print(made.device)
print(torch.ones(2).to(0, torch.float64).dtype, torch.ones(2).to(torch.float16).dtype, torch.ones(2).to(torch.ones(1)).dtype)
line = nn.Linear(1, 1)
print(line.to(torch.device("cuda", 0)).weight.device, line.cuda().weight.device)
"""
    script += """
torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.cuda.set_device(0)
print(torch.distributed.get_backend(), nn.parallel.DistributedDataParallel(line.to(0), device_ids=[0]).device)
"""
    compute.run(commands.job(script), commands.follower)
    assert commands.said()[-7:] == ["cpu"] * 4 + ["torch.float64 torch.float16 torch.float32", "cpu cpu", "gloo cpu"]
    assert sum("no GPU on this machine" in line for line in commands.lines) == 1


def test_sitecustomize_of_the_environment_is_run(compute: LocalCompute, commands: CommandJobs) -> None:
    files = {"main.py": "import sys; print(sys.of_the_user)", "mine/sitecustomize.py": "import sys; sys.of_the_user = 7"}
    compute.run(commands.job("", files=files, env={"PYTHONPATH": "mine"}), commands.follower)
    assert commands.said() == ["7"]


@pytest.mark.slow
def test_killed_torchrun_worker_restarts_the_command(compute: LocalCompute, commands: CommandJobs) -> None:
    script = f"""{TOGETHER}
import time
starts = os.path.join(os.environ["HANZO_ML_CHECKPOINTS"], f"starts-{{rank}}")
open(starts, "a").write("x")
dist.barrier()
os.write(1, f"worker {{rank}} {{os.getpid()}}\\n".encode())  # at once: the other one prints too
while len(open(starts).read()) < 2: time.sleep(0.01)
"""
    job = commands.job(script, command=TWO)
    runner = threading.Thread(target=compute.run, args=(job, commands.follower))
    runner.start()
    line = until("a worker", lambda: next((line for line in commands.lines if line.startswith("worker 1")), None))
    os.kill(int(line.split()[2]), signal.SIGKILL)
    runner.join(120)
    assert not runner.is_alive()
    assert len([line for line in commands.said() if line.startswith("worker 1")]) == 2
    assert any("the command was killed (SIGKILL)" in line for line in commands.lines)


def test_a_killed_torchrun_leaves_no_worker_behind(commands: CommandJobs) -> None:
    compute = LocalCompute(commands.jobs, source=commands.source, max_restarts=0, poll_seconds=0.02)
    job = commands.job(f"{TOGETHER}\nimport time\nos.write(1, b'worker %d\\n' % os.getpid())\ntime.sleep(600)", command=TWO)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            compute.run(job, commands.follower)
        except JobFailed as error:
            failed.append(error)

    runner = threading.Thread(target=run)
    runner.start()
    until("both workers", lambda: sum(line.startswith("worker") for line in commands.lines) == 2)
    workers = {int(line.split()[1]) for line in commands.lines if line.startswith("worker")}
    (parent,) = set(find_job_processes(ID)) - workers
    assert b"torchrun" in (PROC_FOLDER / str(parent) / "cmdline").read_bytes()
    os.kill(parent, signal.SIGKILL)
    runner.join(120)
    assert [("killed (SIGKILL)" in str(error)) for error in failed] == [True]
    assert find_job_processes(ID) == []


def test_first_failed_worker_is_quoted(compute: LocalCompute, commands: CommandJobs) -> None:
    script = f"""{TOGETHER}
if rank == 1:
    raise ValueError("no such column")
dist.barrier()
"""
    with pytest.raises(JobFailed, match=r"exited with 1: .*ValueError: no such column") as error:
        compute.run(commands.job(script, command=TWO), commands.follower)
    assert "after 1 attempt" in str(error.value)
