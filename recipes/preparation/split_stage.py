"""Assign records to splits, keeping questions together that masking made equal."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recipes.preparation import encode_stage
from recipes.preparation.oversampling import NO_CLASS, Classes, oversample
from recipes.preparation.plan import Plan, save_array
from recipes.preparation.read_stage import read_summary
from recipes.preparation.split_assignment import (
    SPLITS,
    TRAIN,
    Draws,
    Groups,
    Splits,
    assign_splits,
    count_leaks,
    refuse_empty_splits,
    refuse_missing_groups,
)
from recipes.records.disk_partitions import Scratch, SpilledColumn, build_rows
from recipes.records.key_index import hash_key

# Questions that differ only in masked text are equal after masking: their records must be in the same split.
#
# Records are joined by their questions before and after masking, transitively: connected components of a graph, found by
# propagating the lowest number between both sides until nothing changes. Most records are joined to no other and are left
# out.

UNCHANGED_DRAW = 0xFFFFFFFFFFFFFFFF
SLOTS_PER_RECORD = 8
"""Bytes of the filter per record; fewer if they exceed the memory limit."""
EDGE_ROW = np.dtype([("draw", "<u8"), ("masked", "<u8"), ("found", "<u8"), ("place", "<u8")])


def join_masked_questions(
    records: Callable[[], Iterable[tuple[Draws, Draws]]], total: int, scratch: Scratch
) -> SpilledColumn | None:
    """Join records whose questions are equal after masking.

    They get the lowest of their draws, which is held out first, so that nothing that the previous version held out is
    trained on.

    Args:
        records: returns the draws of all records before and after masking; called several times.
        total: number of records.

    Returns:
        The new draw of each joined record, and `UNCHANGED_DRAW` for others; None if no question was masked.
    """
    masked_slots = mark_masked_draws(records(), min(SLOTS_PER_RECORD * total, scratch.held_bytes))
    if masked_slots is None:
        return None
    edges = scratch.partitions("edges", EDGE_ROW, total)
    before = 0
    for draw, masked in records():
        chosen = np.flatnonzero((draw != masked) | masked_slots[slot_numbers(draw, len(masked_slots))])
        rows = build_rows(EDGE_ROW, draw[chosen], masked[chosen], draw[chosen], before + chosen)
        edges.add(edges.partition_numbers(rows["masked"]), rows)
        before += len(draw)
    # Records with one draw share the lowest number, which is that draw; records with one masked draw may not.
    side, other = "masked", "draw"
    while True:
        changed = False
        after = scratch.partitions(other, EDGE_ROW, total)
        with edges:
            for number in range(edges.count):
                members, lowest = lowest_by_member((rows[side], rows["found"]) for rows in edges.pieces(number))
                for rows in edges.pieces(number):
                    found = lowest[np.searchsorted(members, rows[side])]
                    changed = changed or bool((found != rows["found"]).any())
                    after.add(
                        after.partition_numbers(rows[other]),
                        build_rows(EDGE_ROW, rows["draw"], rows["masked"], found, rows["place"]),
                    )
        edges, side, other = after, other, side
        if not changed:
            break
    joined = scratch.column("joined", np.uint64, total, UNCHANGED_DRAW)
    with edges:
        for number in range(edges.count):
            for rows in edges.pieces(number):
                joined.assign(rows["place"], rows["found"])
    return joined


def mark_masked_draws(records: Iterable[tuple[Draws, Draws]], most: int) -> NDArray[np.bool_] | None:
    """Mark the slots of all draws of masked questions, before and after masking.

    None if there are none. A filter with false positives: records at unmarked slots are joined to no other. Records at
    marked slots that are joined to no other only cost time; they are few unless memory is short for very many masked
    questions.
    """
    masked_slots = np.zeros(1 << most.bit_length() - 1 if most else 1, np.bool_)
    found = False
    for draw, masked in records:
        changed = draw != masked
        for draws in (draw[changed], masked[changed]):
            masked_slots[slot_numbers(draws, len(masked_slots))] = True
            found = found or bool(len(draws))
    return masked_slots if found else None


def slot_numbers(draws: Draws, count: int) -> Draws:
    """Return each draw's slot among `count`, a power of two."""
    return draws & np.uint64(count - 1)


def lowest_by_member(pieces: Iterable[tuple[Draws, Draws]]) -> tuple[Draws, Draws]:
    """Return all members, sorted, and the lowest value of each."""
    members, lowest = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    for more, values in pieces:
        members, values = np.concatenate([members, more]), np.concatenate([lowest, values])
        order = np.lexsort((values, members))
        members, firsts = np.unique(members[order], return_index=True)
        lowest = values[order][firsts]
    return members, lowest


# Decisions about a record that depend on the whole dataset: its split and its number of copies.
#
# Memory holds one partition of the records at a time, and some bytes per group and class.

SPLIT_STAGE = "decided"


@dataclass(frozen=True)
class SplitDecision:
    """Decisions about all records.

    Attributes:
        records: number of records of each split in `SPLITS`, including copies.
        distinct: number of records without copies.
        oversampled: number of copies added, by class.
        leaked: number of held-out records whose question is also in the training split.
    """

    records: tuple[int, ...]
    distinct: int
    oversampled: dict[str, int]
    leaked: int


@dataclass(frozen=True)
class RecordSummaries:
    """Reads the summaries of all ranges, repeatedly."""

    plan: Plan
    lengths: Sequence[int]

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def tables(self) -> Iterator[pa.Table]:
        return (read_summary(self.plan, encode_stage.STAGE, index) for index in range(len(self.plan.ranges)))

    def iterate_draw_pairs(self) -> Iterator[tuple[Draws, Draws]]:
        for table in self.tables():
            yield table.column("draw").to_numpy(), table.column("masked").to_numpy()

    def draws(self, joined: SpilledColumn | None) -> Iterator[Draws]:
        """Yield the draws that decide the records' splits."""
        if joined is None:
            yield from (draw for draw, _ in self.iterate_draw_pairs())
        else:
            for (draw, _), other in zip(self.iterate_draw_pairs(), joined.runs(self.lengths), strict=True):
                yield np.where(other == np.uint64(UNCHANGED_DRAW), draw, other)

    def groups(self) -> Iterator[Groups]:
        if not self.plan.parameters.split.group_by:
            yield from (np.zeros(length, np.uint64) for length in self.lengths)
            return
        for table in self.tables():
            codes, names = encode_texts(table.column("group"))
            yield np.array([hash_key(name) for name in names], np.uint64)[codes]

    def splits(self, assigned: SpilledColumn | None) -> Iterator[Splits]:
        if assigned is not None:
            return assigned.runs(self.lengths)
        return (table.column("split").to_numpy() for table in self.tables())

    def classes(self, assigned: SpilledColumn | None, names: dict[str, int]) -> Iterator[Classes]:
        """Yield the class of each training record by its number in `names`, which is extended."""
        for table, splits in zip(self.tables(), self.splits(assigned), strict=True):
            codes, found = encode_texts(table.column("class"))
            numbers = [names.setdefault(name, len(names)) if name else NO_CLASS for name in found]
            yield np.where(splits == TRAIN, np.array(numbers, np.int64)[codes], NO_CLASS)


def assign_records(plan: Plan, lengths: Sequence[int]) -> SplitDecision:
    """Decide splits and copies of all records, and save them per range.

    Args:
        lengths: number of records per range.

    Raises:
        BadConfiguration: no record has a group, or a split would be empty.
    """
    records, wanted, scratch, leaked = RecordSummaries(plan, lengths), plan.parameters.split, plan.scratch, 0
    with ExitStack() as columns:
        joined = join_masked_questions(records.iterate_draw_pairs, records.total, scratch)
        if joined is not None:
            columns.enter_context(joined)
        assigned = None
        if wanted.column:
            counts = np.zeros(len(SPLITS), np.int64)
            for splits in records.splits(None):
                counts += np.bincount(splits, minlength=len(SPLITS))
            refuse_empty_splits(counts.tolist(), wanted.column)
            leaked = count_leaks(zip(records.draws(joined), records.splits(None), strict=True), records.total, scratch)
        else:
            if wanted.group_by:
                is_grouped = any(encode_texts(table.column("group"))[1] != [""] for table in records.tables() if len(table))
                refuse_missing_groups(is_grouped, wanted)
            drawn = zip(records.draws(joined), records.groups(), strict=True)
            assigned = columns.enter_context(assign_splits(drawn, records.total, wanted, scratch))
        added: dict[str, int] = {}
        copies: Iterable[NDArray[np.int32]] = (np.ones(length, np.int32) for length in lengths)
        if plan.parameters.augment.oversample_minority:
            names: dict[str, int] = {}
            repeated = columns.enter_context(
                oversample(
                    lambda: zip(records.classes(assigned, names), records.draws(joined), strict=True),
                    records.total,
                    plan.parameters.augment.shuffle_seed or 0,
                    scratch,
                )
            )
            copies = repeated.runs(records.classes(assigned, names), lengths)
            added = {name: count for name, number in names.items() if (count := repeated.count_added(number))}
        repeated_counts = np.zeros(len(SPLITS), np.int64)
        for index, (splits, times) in enumerate(zip(records.splits(assigned), copies, strict=True)):
            save_array(plan.place(SPLIT_STAGE, index, "npy"), np.stack([splits, times]))
            repeated_counts += np.bincount(splits, times, len(SPLITS)).astype(np.int64)
    return SplitDecision(tuple(repeated_counts.tolist()), records.total, added, leaked)


def encode_texts(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[str]]:
    """Encode texts as numbers in order of first appearance; returns codes and distinct texts."""
    encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()
