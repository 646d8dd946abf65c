"""The specification's multi-GPU script, verbatim, completed as a user would."""

SPECIFICATION = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def setup_distributed(rank, world_size):
    dist.init_process_group("nccl", rank=rank,
                            world_size=world_size)
    torch.cuda.set_device(rank)

def train(rank, world_size, dataset):
    setup_distributed(rank, world_size)

    model = MyModel().to(rank)
    # Wrap model for distributed training
    model = DistributedDataParallel(model, device_ids=[rank])

    sampler = torch.utils.data.distributed.DistributedSampler(
        dataset, num_replicas=world_size, rank=rank
    )
    loader = DataLoader(dataset, sampler=sampler,
                        batch_size=64)

    for epoch in range(100):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(batch)
            loss.backward()  # Gradients synced via AllReduce
            optimizer.step()
"""

BEFORE = """\
import hashlib
import os
from pathlib import Path

import mlflow
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset
"""

AFTER = """

class MyModel(torch.nn.Module):
    def __init__(self):
        global optimizer, mine
        super().__init__()
        torch.manual_seed(rank)  # other weights on each rank: they agree because DDP makes them
        self.line = torch.nn.Linear(4, 1)
        self.steps = 0
        optimizer, mine = Optimizer(self.parameters(), lr=0.1), self

    def forward(self, batch):
        numbers, sums = batch
        device = self.line.weight.device
        loss = (self.line(numbers.to(device)) - sums.to(device)).square().mean()
        if rank == 0:
            mlflow.log_metric("loss", loss.item(), step=self.steps)
        self.steps += 1
        return loss


class Optimizer(torch.optim.SGD):
    def step(self):
        super().step()
        self.zero_grad()


rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
numbers = torch.randn(128, 4, generator=torch.Generator().manual_seed(1))
if rank == 0:
    mlflow.start_run()
train(rank, world_size, TensorDataset(numbers, numbers.sum(dim=1, keepdim=True)))
left = Path(os.environ["HANZO_ML_CHECKPOINTS"])
(left / f"rank-{rank}.txt").write_text(hashlib.sha256(mine.line.weight.detach().cpu().numpy().tobytes()).hexdigest())
if rank == 0:
    save_file({name: value.contiguous() for name, value in mine.state_dict().items()}, left / "model.safetensors")
    mlflow.end_run()
dist.destroy_process_group()
"""

SCRIPT = BEFORE + SPECIFICATION + AFTER
EPOCHS = 100
