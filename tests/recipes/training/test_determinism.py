"""DDP's gradient buckets are fixed before the first step.

`test_uneven_processes` covers the effect: a killed run of three processes ends bit-identical.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from recipes.training.parallel.ddp_buckets import fix_bucket_order


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_bucket_order_is_fixed_before_the_first_step(alone: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    shared = DistributedDataParallel(model, bucket_cap_mb=0.00001)
    fix_bucket_order(shared)
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    rows = torch.ones(2, 4)
    for _ in range(3):
        shared(rows).sum().backward()
    assert not shared._has_rebuilt_buckets
    found = [weight.grad for weight in model[1:].parameters()]
    model.zero_grad()
    model(rows).sum().backward()
    for gradient, weight in zip(found, model[1:].parameters(), strict=True):
        assert gradient is not None and weight.grad is not None and torch.allclose(gradient, 3 * weight.grad)
