"""Assign records to splits: by their question, or by a column that names the split.

Records whose questions differ only in case or punctuation stay together, so that no test question is trained on. Memory
holds one partition of the records at a time, and 24 bytes per group (`split.group_by`).
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import SplitParameters
from recipes.contracts.quantities import pluralize
from recipes.records.disk_partitions import Partitions, Rows, Scratch, SpilledColumn, build_rows

SPLITS = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)
SPLIT_ALIASES = {"training": "train", "val": "validation", "valid": "validation", "dev": "validation", "eval": "validation"}
DRAW_ROW = np.dtype([("draw", "<u8"), ("group", "<u8"), ("place", "<u8")])
GROUP_ROW = np.dtype([("group", "<u8"), ("count", "<i8")])
NAMED_ROW = np.dtype([("draw", "<u8"), ("split", "i1")])

Draws = NDArray[np.uint64]
Groups = NDArray[np.uint64]
"""A hash of each record's group; equal for all records without groups."""
Splits = NDArray[np.int8]


def parse_split_name(value: object) -> str | None:
    """Return the split named by a record's column; accepts common synonyms."""
    name = str(value).strip().lower()
    name = SPLIT_ALIASES.get(name, name)
    return name if name in SPLITS else None


def draw_rank(text: str, seed: int) -> int:
    """Return a question's 64-bit draw.

    The test split takes the lowest draws, then validation.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}\0{text}".encode()).digest()[:8])


def assign_splits(
    records: Iterable[tuple[Draws, Groups]], total: int, parameters: SplitParameters, scratch: Scratch
) -> SpilledColumn:
    """Return the split of each of `total` records.

    Records with the same draw stay together, in the group of the first one. Ordered round-robin over groups: the lowest draw
    of each group first, then the second of each, and so on. Test takes the first records in this order, then validation.

    Raises:
        BadConfiguration: a split would be empty.
    """
    with scratch.partitions("drawn", DRAW_ROW, total) as drawn:
        place = 0
        for draws, groups in records:
            drawn.add(drawn.partition_numbers(draws), build_rows(DRAW_ROW, draws, groups, place + np.arange(len(draws))))
            place += len(draws)
        names, sizes = count_groups(drawn, total, scratch)
        count = int(sizes.sum())
        held_out = round(count * parameters.test), round(count * parameters.validation)
        for name, size in zip(SPLITS, (count - sum(held_out), *reversed(held_out)), strict=True):
            if not size:
                raise BadConfiguration(
                    f"{pluralize(count, 'distinct record')} cannot fill three splits: {name} would be empty"
                )
        borders = find_boundary(sizes, held_out[0]), find_boundary(sizes, sum(held_out))
        splits = scratch.column("split", np.int8, total, TRAIN)
        before = np.zeros(len(names), np.int64)
        for number in range(drawn.count):
            clusters = find_clusters(drawn, number)
            group = np.searchsorted(names, clusters["group"])
            rank = before[group] + rank_within_group(group)
            present, counts = np.unique(group, return_counts=True)
            before[present] += counts
            in_test, held = (each.contains(rank) for each in borders)
            chosen = np.select([in_test, held], [TEST, VALIDATION], TRAIN).astype(np.int8)
            for rows in drawn.pieces(number):
                splits.assign(rows["place"], chosen[np.searchsorted(clusters["draw"], rows["draw"])])
    return splits


def find_clusters(drawn: Partitions, number: int) -> Rows:
    """Return the first record of each draw in a partition, sorted by draw."""
    found = np.zeros(0, DRAW_ROW)
    for rows in drawn.pieces(number):
        rows = np.concatenate([found, rows]) if len(found) else rows
        found = rows[np.unique(rows["draw"], return_index=True)[1]]
    return found


def count_groups(drawn: Partitions, total: int, scratch: Scratch) -> tuple[Groups, NDArray[np.int64]]:
    """Return all groups, sorted, and the number of clusters in each."""
    found = []
    with scratch.partitions("groups", GROUP_ROW, total) as grouped:
        for number in range(drawn.count):
            groups, counts = np.unique(find_clusters(drawn, number)["group"], return_counts=True)
            grouped.add(grouped.partition_numbers(groups), build_rows(GROUP_ROW, groups, counts))
        for number in range(grouped.count):
            found.append(sum_group_sizes(grouped.pieces(number)))
    return np.concatenate([groups for groups, _ in found]), np.concatenate([sizes for _, sizes in found])


def sum_group_sizes(pieces: Iterable[Rows]) -> tuple[Groups, NDArray[np.int64]]:
    """Return the sorted groups of rows of `GROUP_ROW`, and the sum of their counts."""
    groups, sizes = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for rows in pieces:
        groups, member = np.unique(np.concatenate([groups, rows["group"]]), return_inverse=True)
        sizes = np.bincount(member, np.concatenate([sizes, rows["count"]]), len(groups)).astype(np.int64)
    return groups, sizes


def rank_within_group(group: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many earlier elements are in the same group, for each element."""
    by_group = np.argsort(group, kind="stable")
    begins = np.flatnonzero(np.diff(group[by_group], prepend=-1))
    found = np.empty(len(group), np.int64)
    found[by_group] = np.arange(len(group)) - np.repeat(begins, np.diff(begins, append=len(group)))
    return found


@dataclass
class SplitBoundary:
    """Boundary in the order of ranks.

    All lower ranks are before it, and the first `remaining` of its own rank.
    """

    rank: int
    remaining: int

    def contains(self, rank: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which elements are before the boundary; each may be queried once, in order."""
        own = np.flatnonzero(rank == self.rank)[: self.remaining]
        self.remaining -= len(own)
        found = rank < self.rank
        found[own] = True
        return found


def find_boundary(sizes: NDArray[np.int64], count: int) -> SplitBoundary:
    """Return the boundary after the first `count` elements in rank order.

    `sizes` are those of the groups.
    """
    low, high = 0, int(sizes.max(initial=0))  # the highest rank with at most `count` elements before it
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(sizes, middle).sum() <= count else (low, middle - 1)
    return SplitBoundary(low, count - int(np.minimum(sizes, low).sum()))


def refuse_missing_groups(is_grouped: bool, parameters: SplitParameters) -> None:
    """Raise BadConfiguration if no record has a group: the column is misspelled."""
    if parameters.group_by and not is_grouped:
        raise BadConfiguration(f"no record has a value in the column '{parameters.group_by}': correct split.group_by")


def refuse_empty_splits(counts: Iterable[int], column: str) -> None:
    """Raise BadConfiguration if a split named by the records' column is empty."""
    for name, count in zip(SPLITS, counts, strict=True):
        if not count:
            raise BadConfiguration(f"no record has '{name}' in '{column}': a dataset needs all of {', '.join(SPLITS)}")


def count_leaks(records: Iterable[tuple[Draws, Splits]], total: int, scratch: Scratch) -> int:
    """Return how many held-out records have the same question as a training record."""
    found = 0
    with scratch.partitions("leaks", NAMED_ROW, total) as drawn:
        for draws, splits in records:
            drawn.add(drawn.partition_numbers(draws), build_rows(NAMED_ROW, draws, splits))
        for number in range(drawn.count):
            trained = np.zeros(0, np.uint64)
            for rows in drawn.pieces(number):
                trained = np.union1d(trained, rows["draw"][rows["split"] == TRAIN])
            for rows in drawn.pieces(number):
                found += int(np.isin(rows["draw"][rows["split"] != TRAIN], trained).sum())
    return found
