"""A training node in a thread, with collectives over a list."""

from threading import Barrier
from typing import Any, TypeVar

from recipes.training.parallel.process_group import ProcessGroup

T = TypeVar("T")


class Node(ProcessGroup):
    """Process group of a single-process node in a thread.

    Collectives use a shared list instead of gloo.
    """

    def __init__(self, rank: int, shared: list[Any], all_are_here: Barrier) -> None:
        super().__init__()
        self.rank, self.size = rank, 2
        self._shared, self._all_are_here = shared, all_are_here

    def broadcast(self, value: T) -> T:
        return self.all_gather(value)[0]

    def all_gather(self, value: T) -> list[T]:
        self._shared[self.rank] = value
        self._all_are_here.wait(60)
        values = list(self._shared)
        self._all_are_here.wait(60)
        return values
