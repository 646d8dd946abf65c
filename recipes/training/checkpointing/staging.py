"""What a checkpoint is made of, copied to the host's memory, so that training goes on while it is written.

To write files takes several times as long as to copy (on two cores, four times). The copies take as much memory as the
checkpoint has bytes, from the first one on.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from recipes.training.checkpointing.host_memory import free_memory

T = TypeVar("T")
Action = Callable[[], object]

PINNED = 4 << 30
"""Bytes of a state up to which its copies lie in pinned memory, to which a GPU copies at full speed. Torch rounds each up to
a power of two there: of all weights of a large model, they would take up to twice their bytes.
"""
SPARE = 2
"""Copies are made where this many times their bytes are free: others want some too, as whoever reads data does."""


class Staging:
    """Of one process, for all checkpoints of its run: the copies of each take the place of those of the one before.

    Args:
        processes: how many of this machine make such copies at the same time.
        free: how many bytes of its memory are free.
        in_any: whether something is true in one of the run's processes, all of which call it at once.
    """

    def __init__(
        self, processes: int = 1, free: Callable[[], int] = free_memory, in_any: Callable[[bool], bool] = bool
    ) -> None:
        self._processes = processes
        self._free = free
        self._in_any = in_any
        self._lacks_room = False
        self._rooms: dict[int, list[torch.Tensor]] = {}
        self._given = 0
        self._actions: list[Action] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-write")
        self._written: Future[None] | None = None

    def later(self, state: T, write: Callable[[T], object]) -> None:
        """Have `write` called with a copy of `state`, tensors in dicts and lists, while training goes on.

        Where no memory is left for the copy, it is called with `state` itself, as `begin` is.
        """
        # What shares memory, as tied weights do, shares it in the copy too.
        different = {place_of(tensor): tensor for tensor in tree_leaves(state) if isinstance(tensor, torch.Tensor)}
        room = self._room_for(list(different.values()))
        if room is None:
            self._lacks_room = True
            self.then(lambda: write(state))
            return
        copies = dict(zip(different, room, strict=True))
        copy_all(different.values(), room)
        copy = tree_map_only(torch.Tensor, lambda tensor: copies[place_of(tensor)], state)
        self.then(lambda: write(copy))

    def then(self, action: Action) -> None:
        """Have something done while training goes on, when all is written that was given before."""
        self._actions.append(action)

    def begin(self) -> Future[None]:
        """Write what was given. It is done when all is written, or something failed.

        Where one process lacks memory for copies, all wait for that, and what fails is raised: some of it goes from process
        to process. One that wrote by itself, and earlier, waited for the others, and they for it.
        """
        waits, self._lacks_room = self._in_any(self._lacks_room), False
        begun = self._written = self._writer.submit(do, self._taken())
        if waits:
            self.settle()
        return begun

    def settle(self) -> None:
        """Wait until all is written; then there is room for the next checkpoint. Raises what failed, once."""
        self._actions, self._given, self._lacks_room = [], 0, False
        written, self._written = self._written, None
        if written:
            written.result()

    def notice(self) -> None:
        """Raise what has failed: the next checkpoint may be an hour away."""
        if self._written and self._written.done():
            self.settle()

    def close(self) -> None:
        """Settle after the last checkpoint. What follows training has the memory of the copies."""
        try:
            self.settle()
        finally:
            self._rooms.clear()

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _room_for(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """That of the state which was given in its place the last time, or new one; none where too little memory is free."""
        place, self._given = self._given, self._given + 1
        room = self._rooms.get(place, [])
        if [form_of(tensor) for tensor in room] == [form_of(tensor) for tensor in tensors]:
            return room
        size = sum(tensor.nbytes for tensor in tensors)
        if size * self._processes * SPARE > self._free():
            return None
        try:
            self._rooms[place] = [
                torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda and size <= PINNED) for tensor in tensors
            ]
        except (RuntimeError, MemoryError):  # as torch says it, which varies: no step lacked memory, and none gets smaller
            return None
        return self._rooms[place]


@torch.no_grad()
def copy_all(tensors: Iterable[torch.Tensor], room: Iterable[torch.Tensor]) -> None:
    """By one thread, which moves some GB a second: where others want the processor too, several wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for tensor, place in zip(tensors, room, strict=True):
            place.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    finally:
        torch.set_num_threads(threads)


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """What tells it from all others that are not the same numbers in the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def form_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype


def do(actions: Iterable[Action]) -> None:
    for action in actions:
        action()
