"""The processes that train one model together, and their control collectives."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from recipes.contracts.job import BadConfiguration, Distributed
from recipes.machine import read_machine

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""How long the others wait for one that fetches a base model for all."""


class ProcessGroup:
    """`rank` counts from 0 over all nodes, `local_rank` on one, where there are `local_size`.

    Rank 0 leads: it logs, saves and publishes. Ranks that follow each other compute the same rows `model_parallel_size`, and
    have the same `data_rank`; `is_pipelined` each has other layers.
    """

    model_parallel_size = 1
    is_pipelined = False

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, local_size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self._control_group: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if size > 1 else None
        # Those of a node wait for each other in a thread, while all agree on something else: one group would mix the two up.
        self._node_group: Any = None
        if size > 1 and local_size > 1:
            found: Any = dist.new_subgroups(local_size, backend="gloo", timeout=COLLECTIVE_TIMEOUT)  # type: ignore[no-untyped-call]
            self._node_group = found[0]

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.rank // self.model_parallel_size

    @property
    def data_size(self) -> int:
        return self.size // self.model_parallel_size

    @property
    def random_stream(self) -> int:
        """Which random numbers a process draws: what is computed twice drops out the same, and other layers do not."""
        return self.rank if self.is_pipelined else self.data_rank

    @property
    def num_random_streams(self) -> int:
        return self.size if self.is_pipelined else self.data_size

    def broadcast(self, value: T) -> T:
        """The leader's value, in every process."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, group=self._control_group)
        return values[0]

    @property
    def nodes(self) -> int:
        return max(1, self.size // self.local_size)

    @property
    def node(self) -> int:
        """Which node this process runs on; the leader's is 0."""
        return self.rank // self.local_size

    def broadcast_on_node(self, value: T) -> T:
        """That of the first process of the same node, in every process. What differs between nodes is a folder."""
        return self.all_gather(value)[self.rank - self.local_rank]

    def barrier_on_node(self) -> None:
        """Until all processes of this node are here; in a thread, while training goes on."""
        if self._node_group:
            dist.barrier(group=self._node_group)

    def gather(self, value: T) -> list[T]:
        """The values of all, by rank, for the leader; none for the others."""
        values: list[Any] | None = [value] * self.size if self.is_leader else None
        if self.size > 1:
            dist.gather_object(value, values, dst=0, group=self._control_group)
        return values or []

    def any(self, flag: bool) -> bool:
        """Whether it is true in one of the processes."""
        return any(self.all_gather(flag))

    def all_gather(self, value: T) -> list[T]:
        """The values of all, by rank, in every process."""
        values: list[T] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self._control_group)
        return values

    def destroy(self) -> None:
        """After the last thing that they do together; all wait for all, and from here on each is alone.

        Else NCCL's communicators would end with their processes, that of the leader minutes after the others, for whom it
        would wait. One that has failed does not call this: it would wait for others that wait for it.
        """
        self.all_gather(None)
        if self.size > 1:
            dist.destroy_process_group()

    @contextmanager
    def local_leader_first(self) -> Iterator[None]:
        """The block runs in one process of each node first, and then in the others, which find what it left."""
        if self.local_rank != 0:
            self.all_gather(None)
        yield
        if self.local_rank == 0:
            self.all_gather(None)


def join_process_group(distributed: Distributed | None) -> ProcessGroup:
    """The group that torchrun started this process in, or this process alone. Gradients go over NCCL, on a CPU over gloo.

    Raises:
        BadConfiguration: they are to go over NCCL between GPUs that this torch cannot use, or are more than those are.
    """
    if distributed is None or not dist.is_torchelastic_launched():
        return ProcessGroup()
    on_gpus = torch.cuda.is_available()
    if distributed.backend == "nccl" and torch.version.cuda is None and read_machine().gpus:
        wanted = torch.__version__.partition("+")[0]
        raise BadConfiguration(
            f"there are NVIDIA GPUs here, and torch {torch.__version__} was built without CUDA: install the one that was "
            f"built with it (pip install --force-reinstall torch=={wanted}), or set distributed.backend to gloo, to train "
            "on the processor"
        )
    if on_gpus and (there := torch.cuda.device_count()) < distributed.gpus_per_node:
        raise BadConfiguration(
            f"distributed.gpus_per_node is {distributed.gpus_per_node}, one process for each GPU, and this "
            f"program sees {there}: "
            f"set it to {there}, or take hardware with more GPUs (CUDA_VISIBLE_DEVICES, where it is set, says which it sees)"
        )
    dist.init_process_group(distributed.backend if on_gpus else "gloo")
    local_rank = dist.get_node_local_rank()
    if on_gpus:
        torch.cuda.set_device(local_rank)
    # NCCL connects them now, while nothing else is under way. Stages would have it do so in the middle of their first step,
    # with some of them waiting for each other (torch 2.13, `_PipelineSchedule._warmup_p2p`); and a network that keeps them
    # apart is found before a model is loaded.
    dist.all_reduce(torch.zeros((), device="cuda" if on_gpus else "cpu"))
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), local_rank, distributed.gpus_per_node)
