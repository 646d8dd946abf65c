"""A user's FSDP script on two nodes resumes bit-identically from S3 after a kill."""

import socket
from pathlib import Path

import pytest

from recipes.storage.artifact_store import Store
from tests.support.recipes.command_gang import NODES, Pods
from tests.support.recipes.command_program import CommandJobs, until
from tests.support.s3_server import VARIABLES, S3Server

pytestmark = [pytest.mark.slow, pytest.mark.long]

STEPS = 14
SCRIPT = f"""
import os, pathlib, shutil, time
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, kept = dist.get_rank(), pathlib.Path(os.environ["HANZO_ML_CHECKPOINTS"])
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
for layer in model:
    if isinstance(layer, nn.Linear): fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def state():
    weights, moments = get_state_dict(model, optimizer)
    return {{"model": weights, "optimizer": moments}}

first = max([int(path.parent.name[5:]) for path in kept.glob("step-*/.metadata")], default=0)  # written when all shards are
if first:
    found = state()
    dcp.load(found, checkpoint_id=kept / f"step-{{first}}")
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
print("begins after", first, flush=True)
for step in range(first + 1, {STEPS} + 1):
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(8, 16, generator=generator)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item().hex(), flush=True)
    dcp.save(state(), checkpoint_id=kept / f"step-{{step}}")
    shutil.rmtree(kept / f"step-{{step - 2}}", ignore_errors=True)
    time.sleep(0.5)
"""


def test_fsdp_script_resumes_from_shards_of_both_nodes(tmp_path: Path, s3: S3Server) -> None:
    commands = CommandJobs(tmp_path, Store(s3.address, VARIABLES))
    shape = {"num_nodes": NODES, "gpus_per_node": 1, "backend": "gloo"}
    job = commands.job(SCRIPT, command=["torchrun", "main.py"], distributed=shape, schedule={"checkpoint_interval": "0.2s"})
    first = Pods(job, tmp_path / "first", **rendezvous(), **VARIABLES)
    try:
        until("a state of both", commands.state, 120)
        done = len(steps(first))
        until("steps that no state has", lambda: len(steps(first)) >= done + 6)
    finally:
        first.kill()
    again = Pods(job, tmp_path / "second", **rendezvous(), **VARIABLES)
    codes = [process.wait(120) for process in again.processes]
    assert codes == [0, 0], again.lines()
    (begun,) = {line for line in again.lines() if line.startswith("begins after")}
    after = int(begun.removeprefix("begins after "))
    assert after > 0, "it started from scratch"
    before, now = steps(first), steps(again)
    assert {number for number, _ in now} == {*range(after + 1, STEPS + 1)}
    twice = {key for key in before if key[0] > after}
    assert len(twice) >= NODES, "the first gang came no further than its state"
    assert all(now[key] == before[key] for key in twice)


def steps(pods: Pods) -> dict[tuple[int, int], str]:
    """Return the loss of each step on each node."""
    found = {}
    for rank, log in enumerate(pods.logs):
        for line in log.read_text().splitlines():
            if line.startswith("step ") and len(line.split()) == 3:
                _, step, loss = line.split()
                found[int(step), rank] = loss
    return found


def rendezvous() -> dict[str, str]:
    """Return the rendezvous environment of a gang's pods, with torchrun's variable names."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "PET_NNODES": str(NODES),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
