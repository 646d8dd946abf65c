"""How the processes of a run connect and disconnect."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipes.contracts.job import BadConfiguration, Distributed
from recipes.training.parallel.process_group import join_process_group
from tests.support.free_ports import free_port


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the environment that torchrun gives to the only process of a job."""
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "job"}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_more_processes_than_gpus_are_refused_before_joining(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reported "invalid device ordinal", an error that is retried."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BadConfiguration, match=r"gpus_per_node is 2, .* and this program sees 1: set it to 1"):
        join_process_group(Distributed(strategy="ddp", gpus_per_node=2))
    assert not dist.is_initialized()


def test_processes_connect_when_joining_the_group(launched: None) -> None:
    """NCCL connects processes only in their first collective."""
    join_process_group(Distributed(strategy="pipeline", gpus_per_node=1, backend="gloo"))
    group: Any = dist.distributed_c10d._get_default_group()
    assert group._get_sequence_number_for_group() == 1


def test_destroyed_process_group_leaves_none_initialized(launched: None) -> None:
    group = join_process_group(Distributed(strategy="ddp", gpus_per_node=1, backend="gloo"))
    group.size = 2
    group.all_gather = lambda value: [value] * 2  # type: ignore[method-assign]
    group.destroy()
    assert not dist.is_initialized()
