"""Copies of training records, so that all classes have as many as the largest."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recipes.assignment import Draws, ranks
from recipes.partitions import Column, Scratch, rows_of
from recipes.preparation.hashing import mixed

NO_CLASS = -1
"""Of a record that is not repeated: it has no class, or is held out, where scores would count some of them twice."""
MEMBER = np.dtype([("mixed", "<u8"), ("class", "<i8"), ("place", "<u8")])

Classes = NDArray[np.int64]


@dataclass(frozen=True)
class Copies(AbstractContextManager["Copies"]):
    """How often records stand in the training split: of each class all of them `each` times, and some once more."""

    sizes: NDArray[np.int64]
    once_more: Column

    @property
    def target(self) -> int:
        return int(self.sizes.max(initial=0))

    @property
    def each(self) -> NDArray[np.int64]:
        return self.target // np.maximum(self.sizes, 1)

    def added(self, number: int) -> int:
        """How many copies were added to a class."""
        return self.target - int(self.sizes[number]) if number < len(self.sizes) and self.sizes[number] else 0

    def runs(self, classes: Iterable[Classes], lengths: Iterable[int]) -> Iterator[NDArray[np.int32]]:
        """The copies of records of these classes."""
        times = np.append(self.each, 1).astype(np.int32)  # the last one is of `NO_CLASS`
        for known, more in zip(classes, self.once_more.runs(lengths), strict=True):
            yield times[known] + more

    def __exit__(self, *exception: object) -> None:
        self.once_more.__exit__(*exception)


def oversample(members: Callable[[], Iterable[tuple[Classes, Draws]]], total: int, seed: int, scratch: Scratch) -> Copies:
    """Decide who is repeated.

    Args:
        members: gives the class and the draw of each of `total` records, as often as it is called.
    """
    sizes = np.zeros(0, np.int64)
    for classes, _ in members():
        here = np.bincount(classes[classes != NO_CLASS], minlength=len(sizes))
        here[: len(sizes)] += sizes
        sizes = here
    copies = Copies(sizes, scratch.column("once_more", np.int32, total, 0))
    rest = copies.target - copies.each * sizes
    # Who stands there once more is drawn, not those that come first.
    with scratch.partitions("members", MEMBER, total) as drawn:
        before = 0
        for classes, draws in members():
            chosen = np.flatnonzero(np.append(rest, 0)[classes])
            keys = mixed(draws[chosen], seed)
            drawn.add(drawn.of_hashes(keys), rows_of(MEMBER, keys, classes[chosen], before + chosen))
            before += len(classes)
        taken = np.zeros_like(sizes)
        for number in range(drawn.count):
            rows = np.concatenate([np.zeros(0, MEMBER), *drawn.pieces(number)])
            rows = rows[np.lexsort((rows["place"], rows["mixed"]))]
            copies.once_more.put(rows["place"][taken[rows["class"]] + ranks(rows["class"]) < rest[rows["class"]]], 1)
            taken += np.bincount(rows["class"], minlength=len(sizes))
    return copies
