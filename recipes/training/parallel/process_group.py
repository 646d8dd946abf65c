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
"""How long processes wait for one that downloads a base model for all."""


class ProcessGroup:
    """The processes of a run.

    `rank` counts over all nodes, `local_rank` on one node of `local_size` processes. Rank 0 is the leader: it logs, saves
    and publishes. Groups of `model_parallel_size` consecutive ranks compute the same rows and share a `data_rank`; with
    `is_pipelined` each of them holds other layers.
    """

    model_parallel_size = 1
    is_pipelined = False

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, local_size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self._control_group: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if size > 1 else None
        # A separate group, because a node's processes synchronize in a thread while all processes use the control group.
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
        """Index of this process's random stream.

        Replicas of the same computation share one, pipeline stages do not.
        """
        return self.rank if self.is_pipelined else self.data_rank

    @property
    def num_random_streams(self) -> int:
        return self.size if self.is_pipelined else self.data_size

    def broadcast(self, value: T) -> T:
        """Return the leader's value in every process."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, group=self._control_group)
        return values[0]

    @property
    def nodes(self) -> int:
        return max(1, self.size // self.local_size)

    @property
    def node(self) -> int:
        """Index of this process's node; the leader's is 0."""
        return self.rank // self.local_size

    def broadcast_on_node(self, value: T) -> T:
        """Return the value of the node's first process; used for folders, which differ between nodes."""
        return self.all_gather(value)[self.rank - self.local_rank]

    def barrier_on_node(self) -> None:
        """Wait for all processes of this node; used in a thread while training continues."""
        if self._node_group:
            dist.barrier(group=self._node_group)

    def gather(self, value: T) -> list[T]:
        """Return all values by rank to the leader; an empty list elsewhere."""
        values: list[Any] | None = [value] * self.size if self.is_leader else None
        if self.size > 1:
            dist.gather_object(value, values, dst=0, group=self._control_group)
        return values or []

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true in any process."""
        return any(self.all_gather(flag))

    def all_gather(self, value: T) -> list[T]:
        """Return all values by rank in every process."""
        values: list[T] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self._control_group)
        return values

    def destroy(self) -> None:
        """End the group, after the last collective; all processes wait for each other.

        Otherwise NCCL's communicators would end with their processes, the leader's minutes after the others', and it would
        wait for them. A process that has failed must not call this, since it would wait for processes that wait for it.
        """
        self.all_gather(None)
        if self.size > 1:
            dist.destroy_process_group()

    @contextmanager
    def local_leader_first(self) -> Iterator[None]:
        """Run the block in one process per node first; the others reuse its results."""
        if self.local_rank != 0:
            self.all_gather(None)
        yield
        if self.local_rank == 0:
            self.all_gather(None)


def join_process_group(distributed: Distributed | None) -> ProcessGroup:
    """Join the group that torchrun started, or return a group of one.

    Uses NCCL on GPUs and gloo on CPUs.

    Raises:
        BadConfiguration: NCCL is requested for GPUs that this torch cannot use, or there are more processes than GPUs.
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
    # Connect NCCL now. Pipeline stages would connect in the middle of their first step, while some of them wait for each
    # other (torch 2.13, `_PipelineSchedule._warmup_p2p`). A broken network is also found before a model is loaded.
    dist.all_reduce(torch.zeros((), device="cuda" if on_gpus else "cpu"))
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), local_rank, distributed.gpus_per_node)
