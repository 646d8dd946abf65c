"""`train.py` of the specification's job: data-parallel steps of a linear model, over all ranks of all nodes."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

import hanzo_ml

STEPS = 5
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

files = sorted(Path(os.environ["HANZO_ML_DATASETS"]).rglob("*.jsonl"))
rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
own = rows[rank::world]
inputs = torch.tensor([row["input"] for row in own], dtype=torch.float64)
answers = torch.tensor([row["answer"] for row in own], dtype=torch.float64)

weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
for step in range(1, STEPS + 1):
    loss = ((weight * inputs - answers) ** 2).sum() / len(rows)
    (gradient,) = torch.autograd.grad(loss, weight)
    total = torch.stack([loss.detach(), gradient])
    dist.all_reduce(total)
    with torch.no_grad():
        weight -= 0.1 * total[1]
    if rank == 0:
        print(f"step {step}/{STEPS} loss {total[0]:.6f}", flush=True)
        hanzo_ml.log_metric("train/loss", float(total[0]), step=step)

hosts: list[str] = [""] * world
dist.all_gather_object(hosts, os.uname().nodename)
if rank == 0:
    result = {"weight": float(weight), "world": world, "hosts": sorted(set(hosts)), "rows": len(rows)}
    (Path(os.environ["HANZO_ML_CHECKPOINTS"]) / "result.json").write_text(json.dumps(result))
dist.destroy_process_group()
