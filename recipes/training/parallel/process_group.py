"""The processes that train one model together, and what they have to agree on; alone, one agrees with itself.

What goes from process to process here is small and seldom, and travels over gloo: gradients are the strategy's business.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from recipes.contracts.job import BadConfiguration, Distributed
from recipes.machine import read_machine

T = TypeVar("T")

PATIENCE = timedelta(hours=2)
"""How long the others wait for one that fetches a base model for all."""


class Group:
    """`rank` counts from 0 over all nodes, `local_rank` on one, where there are `on_this_node`.

    Rank 0 leads: it logs, saves and publishes. Ranks that follow each other compute the same rows `together`, and have the
    same `data_rank`; `in_stages` each has other layers.
    """

    together = 1
    in_stages = False

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, on_this_node: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.on_this_node = on_this_node
        self._control: Any = dist.new_group(backend="gloo", timeout=PATIENCE) if size > 1 else None
        # Those of a node wait for each other in a thread, while all agree on something else: one group would mix the two up.
        self._on_this_node: Any = None
        if size > 1 and on_this_node > 1:
            found: Any = dist.new_subgroups(on_this_node, backend="gloo", timeout=PATIENCE)  # type: ignore[no-untyped-call]
            self._on_this_node = found[0]

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.rank // self.together

    @property
    def data_size(self) -> int:
        return self.size // self.together

    @property
    def stream(self) -> int:
        """Which random numbers a process draws: what is computed twice drops out the same, and other layers do not."""
        return self.rank if self.in_stages else self.data_rank

    @property
    def streams(self) -> int:
        return self.size if self.in_stages else self.data_size

    def share(self, value: T) -> T:
        """The leader's value, in every process."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, group=self._control)
        return values[0]

    @property
    def nodes(self) -> int:
        return max(1, self.size // self.on_this_node)

    @property
    def node(self) -> int:
        """Which node this process runs on; the leader's is 0."""
        return self.rank // self.on_this_node

    def share_on_node(self, value: T) -> T:
        """That of the first process of the same node, in every process. What differs between nodes is a folder."""
        return self.collect(value)[self.rank - self.local_rank]

    def wait_on_node(self) -> None:
        """Until all processes of this node are here; in a thread, while training goes on."""
        if self._on_this_node:
            dist.barrier(group=self._on_this_node)

    def gather(self, value: T) -> list[T]:
        """The values of all, by rank, for the leader; none for the others."""
        values: list[Any] | None = [value] * self.size if self.leads else None
        if self.size > 1:
            dist.gather_object(value, values, dst=0, group=self._control)
        return values or []

    def any(self, flag: bool) -> bool:
        """Whether it is true in one of the processes."""
        return any(self.collect(flag))

    def collect(self, value: T) -> list[T]:
        """The values of all, by rank, in every process."""
        values: list[T] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self._control)
        return values

    def disband(self) -> None:
        """After the last thing that they do together; all wait for all, and from here on each is alone.

        Else NCCL's communicators would end with their processes, that of the leader minutes after the others, for whom it
        would wait. One that has failed does not call this: it would wait for others that wait for it.
        """
        self.collect(None)
        if self.size > 1:
            dist.destroy_process_group()

    @contextmanager
    def one_fetches(self) -> Iterator[None]:
        """The block runs in one process of each node first, and then in the others, which find what it left."""
        if self.local_rank != 0:
            self.collect(None)
        yield
        if self.local_rank == 0:
            self.collect(None)


def join(shape: Distributed | None) -> Group:
    """The group that torchrun started this process in, or this process alone. Gradients go over NCCL, on a CPU over gloo.

    Raises:
        BadConfiguration: they are to go over NCCL between GPUs that this torch cannot use, or are more than those are.
    """
    if shape is None or not dist.is_torchelastic_launched():
        return Group()
    on_gpus = torch.cuda.is_available()
    if shape.backend == "nccl" and torch.version.cuda is None and read_machine().gpus:
        wanted = torch.__version__.partition("+")[0]
        raise BadConfiguration(
            f"there are NVIDIA GPUs here, and torch {torch.__version__} was built without CUDA: install the one that was "
            f"built with it (pip install --force-reinstall torch=={wanted}), or set distributed.backend to gloo, to train "
            "on the processor"
        )
    if on_gpus and (there := torch.cuda.device_count()) < shape.gpus_per_node:
        raise BadConfiguration(
            f"distributed.gpus_per_node is {shape.gpus_per_node}, one process for each GPU, and this program sees {there}: "
            f"set it to {there}, or take hardware with more GPUs (CUDA_VISIBLE_DEVICES, where it is set, says which it sees)"
        )
    dist.init_process_group(shape.backend if on_gpus else "gloo")
    local_rank = dist.get_node_local_rank()
    if on_gpus:
        torch.cuda.set_device(local_rank)
    # NCCL connects them now, while nothing else is under way. Stages would have it do so in the middle of their first step,
    # with some of them waiting for each other (torch 2.13, `_PipelineSchedule._warmup_p2p`); and a network that keeps them
    # apart is found before a model is loaded.
    dist.all_reduce(torch.zeros((), device="cuda" if on_gpus else "cpu"))
    return Group(dist.get_rank(), dist.get_world_size(), local_rank, shape.gpus_per_node)
