"""Oversample training records of minority classes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from recipes.preparation.shuffle_plan import mix_bits
from recipes.preparation.split_assignment import Draws, rank_within_group
from recipes.records.disk_partitions import Rows, Scratch, SpilledColumn, build_rows

NO_CLASS = -1
"""A record that is not repeated: it has no class, or is held out, where copies would count twice in scores."""
MEMBER_ROW = np.dtype([("mixed", "<u8"), ("class", "<i8"), ("place", "<u8")])

Classes = NDArray[np.int64]


@dataclass(frozen=True)
class Copies(AbstractContextManager["Copies"]):
    """Copies of training records.

    `each` of every record in a class, and one more of some.
    """

    sizes: NDArray[np.int64]
    extra_copies: SpilledColumn

    @cached_property
    def target(self) -> int:
        return int(self.sizes.max(initial=0))

    @cached_property
    def each(self) -> NDArray[np.int64]:
        return self.target // np.maximum(self.sizes, 1)

    def count_added(self, number: int) -> int:
        """Return how many copies were added to a class."""
        return self.target - int(self.sizes[number]) if number < len(self.sizes) and self.sizes[number] else 0

    def runs(self, classes: Iterable[Classes], lengths: Iterable[int]) -> Iterator[NDArray[np.int32]]:
        """Yield the number of copies for records with these classes."""
        times = np.append(self.each, 1).astype(np.int32)  # the last element is for `NO_CLASS`
        for known, more in zip(classes, self.extra_copies.runs(lengths), strict=True):
            yield times[known] + more

    def __exit__(self, *exception: object) -> None:
        self.extra_copies.__exit__(*exception)


def oversample(members: Callable[[], Iterable[tuple[Classes, Draws]]], total: int, seed: int, scratch: Scratch) -> Copies:
    """Choose how many copies of each record make all classes equally large.

    Args:
        members: returns classes and draws of all records; called several times.
        total: number of records.
    """
    sizes = np.zeros(0, np.int64)
    for classes, _ in members():
        class_sizes = np.bincount(classes[classes != NO_CLASS], minlength=len(sizes))
        class_sizes[: len(sizes)] += sizes
        sizes = class_sizes
    copies = Copies(sizes, scratch.column("once_more", np.int32, total, 0))
    rest = copies.target - copies.each * sizes
    # The records with one copy more are drawn at random, rather than the first ones.
    with scratch.partitions("members", MEMBER_ROW, total) as drawn:
        before = 0
        for classes, draws in members():
            chosen = np.flatnonzero(np.append(rest, 0)[classes])
            keys = mix_bits(draws[chosen], seed)
            drawn.add(drawn.partition_numbers(keys), build_rows(MEMBER_ROW, keys, classes[chosen], before + chosen))
            before += len(classes)
        left = rest.copy()
        for number in range(drawn.count):
            quotas = compute_quotas(drawn.pieces(number), left)
            for rows in drawn.pieces(number):
                for code, quota in quotas.items():
                    own = rows[rows["class"] == code]
                    copies.extra_copies.assign(own["place"][quota.is_selected(own["mixed"])], 1)
    return copies


@dataclass
class ClassQuota:
    """Number of members with each draw that get one more copy.

    The first ones of equal draws.
    """

    numbers: Draws
    left: NDArray[np.int64]

    def is_selected(self, numbers: Draws) -> NDArray[np.bool_]:
        """Return which members get one more copy.

        Call once per member, in the order of the input.
        """
        member = np.searchsorted(self.numbers, numbers)
        found = rank_within_group(member) < self.left[member]
        class_sizes, counts = np.unique(member, return_counts=True)
        self.left[class_sizes] -= counts
        return found


def compute_quotas(pieces: Iterable[Rows], left: NDArray[np.int64]) -> dict[int, ClassQuota]:
    """Return the quotas of a partition, lowest draws first.

    They are subtracted from `left` of each class.
    """
    counted: dict[int, tuple[Draws, NDArray[np.int64]]] = {}
    for rows in pieces:
        for code in np.unique(rows["class"]).tolist():
            numbers, sizes = counted.get(code, (np.zeros(0, np.uint64), np.zeros(0, np.int64)))
            more = rows["mixed"][rows["class"] == code]
            numbers, member = np.unique(np.concatenate([numbers, more]), return_inverse=True)
            weights = np.concatenate([sizes, np.ones(len(more), np.int64)])
            counted[code] = numbers, np.bincount(member, weights, len(numbers)).astype(np.int64)
    quotas = {}
    for code, (numbers, sizes) in counted.items():
        quota = np.clip(left[code] - (np.cumsum(sizes) - sizes), 0, sizes)
        left[code] -= quota.sum()
        quotas[code] = ClassQuota(numbers, quota)
    return quotas
