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

# Two questions that differ in what was masked alone are one question then: their records must stay together.
#
# Records are joined by what they asked and by what they ask since, whatever lies between them: components of a graph,
# whose lowest number wanders from side to side until none changes. Most records are joined to no other, and are left out
# of that.

UNCHANGED_DRAW = 0xFFFFFFFFFFFFFFFF
SLOTS_PER_RECORD = 8
"""For each record, of a byte each: fewer where these are more than memory holds."""
EDGE_ROW = np.dtype([("draw", "<u8"), ("masked", "<u8"), ("found", "<u8"), ("place", "<u8")])


def join_masked_questions(
    records: Callable[[], Iterable[tuple[Draws, Draws]]], total: int, scratch: Scratch
) -> SpilledColumn | None:
    """The draw of each record, of the question as it was, made equal for those that ask the same since it was masked.

    They take the lowest, which is held out first, so that nothing that the version before held out is trained on.

    Args:
        records: gives of each of `total` records the draw of its question as it was and as it is, as often as it is called.

    Returns:
        the draws of those that have another one now, and `UNCHANGED_DRAW` for all others; None where no question was masked.
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
    # All of one draw have the lowest of theirs, which is their own: those of one question as it is may not.
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
    """Marks at up to `most` slots of all draws that a masked question has, before or since; None where there is none.

    A record that is at none of them is joined to no other. Few more are at one than are joined to some other, unless memory
    holds few slots for very many masked questions: those that are at one are only looked at in vain.
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
    """A place among `count`, a power of two, for each draw."""
    return draws & np.uint64(count - 1)


def lowest_by_member(pieces: Iterable[tuple[Draws, Draws]]) -> tuple[Draws, Draws]:
    """All members, in order, and the lowest value that each has."""
    members, lowest = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    for more, values in pieces:
        members, values = np.concatenate([members, more]), np.concatenate([lowest, values])
        order = np.lexsort((values, members))
        members, firsts = np.unique(members[order], return_index=True)
        lowest = values[order][firsts]
    return members, lowest


# What only the whole dataset can tell of a record that stays: which split it is in, and how often it stands there.
#
# Memory holds a partition of the records at a time, and some bytes for each group and class.

SPLIT_STAGE = "decided"


@dataclass(frozen=True)
class SplitDecision:
    """What was decided of all records.

    `records` are those of each split of `SPLITS`, copies among them, and `distinct` all without copies. `oversampled` has
    the copies that were added to each class, and `leaked` counts held-out records that ask what a training record asks.
    """

    records: tuple[int, ...]
    distinct: int
    oversampled: dict[str, int]
    leaked: int


@dataclass(frozen=True)
class RecordSummaries:
    """What the ranges tell of their records, one range after the other, as often as it is asked for."""

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
        """The draws by which records come to their split."""
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
        """The class of each record that is trained on, by its number in `names`, to which new ones are added."""
        for table, splits in zip(self.tables(), self.splits(assigned), strict=True):
            codes, found = encode_texts(table.column("class"))
            numbers = [names.setdefault(name, len(names)) if name else NO_CLASS for name in found]
            yield np.where(splits == TRAIN, np.array(numbers, np.int64)[codes], NO_CLASS)


def assign_records(plan: Plan, lengths: Sequence[int]) -> SplitDecision:
    """Decide of all records, of which each range has so many; left for each range: their splits and copies.

    Raises:
        BadConfiguration: none is in a group, or a split would be empty.
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
    """Texts as numbers, in the order of their first appearance; and the texts."""
    encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()
