"""`train.py` of the specification's job: data-parallel steps of a linear model.

It uses all ranks of all nodes. 32 ranks that load torch take 10 GB. So the first of each node loads it once, and forks the
seven others, which share its memory; the processes that torchrun started for those wait for them.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import hanzo_ml

STEPS = 5
ADDRESS = "\0ranks of this node"


def train() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    files = sorted(Path(os.environ["HANZO_ML_DATASETS"]).rglob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    own = rows[rank::world]
    inputs = torch.tensor([row["input"] for row in own], dtype=torch.float64)
    answers = torch.tensor([row["answer"] for row in own], dtype=torch.float64)
    weight = torch.zeros((), dtype=torch.float64)
    for step in range(1, STEPS + 1):
        errors = weight * inputs - answers
        total = torch.stack([(errors**2).sum(), (2 * errors * inputs).sum()]) / len(rows)  # loss and gradient
        dist.all_reduce(total)
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


def fork_others(count: int) -> None:
    """Fork a rank for each process that sends a request with its environment.

    The response is sent when that rank has finished training.
    """
    import torch.distributed  # noqa: F401  # once for all

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(ADDRESS)
    listener.listen(count)
    for _ in range(count):
        asking, _ = listener.accept()
        variables = json.loads(asking.makefile().readline())
        if os.fork() == 0:
            os.environ.update(variables)
            train()
            asking.sendall(b"done")
            os._exit(0)
        asking.close()


def ask_for_rank() -> None:
    asking = socket.socket(socket.AF_UNIX)
    while asking.connect_ex(ADDRESS):  # the first loads torch
        time.sleep(0.2)
    asking.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
    if asking.recv(4) != b"done":
        sys.exit(f"rank {os.environ['RANK']} failed")


if os.environ["LOCAL_RANK"] != "0":
    ask_for_rank()
else:
    fork_others(int(os.environ["LOCAL_WORLD_SIZE"]) - 1)
    train()
