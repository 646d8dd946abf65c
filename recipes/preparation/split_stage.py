"""What only the whole dataset can tell of a record that stays: which split it is in, and how often it stands there.

Memory holds a partition of the records at a time, and some bytes for each group and class.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recipes.preparation import encode_stage
from recipes.preparation.joining import AS_IT_WAS, together
from recipes.preparation.oversampling import NO_CLASS, Classes, oversample
from recipes.preparation.plan import Plan
from recipes.preparation.read_stage import told
from recipes.preparation.split_assignment import SPLITS, TRAIN, Draws, Groups, Splits, assign, leaks, named, refuse_no_groups
from recipes.preparation.tables import save_array
from recipes.records.disk_partitions import Column
from recipes.records.key_index import hash_of

DECIDED = "decided"


@dataclass(frozen=True)
class Decided:
    """What was decided of all records.

    `records` are those of each split of `SPLITS`, copies among them, and `distinct` all without copies. `oversampled` has
    the copies that were added to each class, and `leaked` counts held-out records that ask what a training record asks.
    """

    records: tuple[int, ...]
    distinct: int
    oversampled: dict[str, int]
    leaked: int


@dataclass(frozen=True)
class Told:
    """What the ranges tell of their records, one range after the other, as often as it is asked for."""

    plan: Plan
    lengths: Sequence[int]

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def tables(self) -> Iterator[pa.Table]:
        return (told(self.plan, encode_stage.STAGE, index) for index in range(len(self.plan.ranges)))

    def both_draws(self) -> Iterator[tuple[Draws, Draws]]:
        for table in self.tables():
            yield table.column("draw").to_numpy(), table.column("masked").to_numpy()

    def draws(self, joined: Column | None) -> Iterator[Draws]:
        """The draws by which records come to their split."""
        if joined is None:
            yield from (draw for draw, _ in self.both_draws())
        else:
            for (draw, _), other in zip(self.both_draws(), joined.runs(self.lengths), strict=True):
                yield np.where(other == np.uint64(AS_IT_WAS), draw, other)

    def groups(self) -> Iterator[Groups]:
        if not self.plan.parameters.split.group_by:
            yield from (np.zeros(length, np.uint64) for length in self.lengths)
            return
        for table in self.tables():
            codes, names = codes_of(table.column("group"))
            yield np.array([hash_of(name) for name in names], np.uint64)[codes]

    def splits(self, assigned: Column | None) -> Iterator[Splits]:
        if assigned is not None:
            return assigned.runs(self.lengths)
        return (table.column("split").to_numpy() for table in self.tables())

    def classes(self, assigned: Column | None, names: dict[str, int]) -> Iterator[Classes]:
        """The class of each record that is trained on, by its number in `names`, to which new ones are added."""
        for table, splits in zip(self.tables(), self.splits(assigned), strict=True):
            codes, found = codes_of(table.column("class"))
            numbers = [names.setdefault(name, len(names)) if name else NO_CLASS for name in found]
            yield np.where(splits == TRAIN, np.array(numbers, np.int64)[codes], NO_CLASS)


def decide(plan: Plan, lengths: Sequence[int]) -> Decided:
    """Decide of all records, of which each range has so many; left for each range: their splits and copies.

    Raises:
        BadConfiguration: none is in a group, or a split would be empty.
    """
    records, wanted, scratch, leaked = Told(plan, lengths), plan.parameters.split, plan.scratch, 0
    with ExitStack() as columns:
        joined = together(records.both_draws, records.total, scratch)
        if joined is not None:
            columns.enter_context(joined)
        assigned = None
        if wanted.column:
            counts = np.zeros(len(SPLITS), np.int64)
            for splits in records.splits(None):
                counts += np.bincount(splits, minlength=len(SPLITS))
            named(counts.tolist(), wanted.column)
            leaked = leaks(zip(records.draws(joined), records.splits(None), strict=True), records.total, scratch)
        else:
            if wanted.group_by:
                is_grouped = any(codes_of(table.column("group"))[1] != [""] for table in records.tables() if len(table))
                refuse_no_groups(is_grouped, wanted)
            drawn = zip(records.draws(joined), records.groups(), strict=True)
            assigned = columns.enter_context(assign(drawn, records.total, wanted, scratch))
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
            added = {name: count for name, number in names.items() if (count := repeated.added(number))}
        repeated_counts = np.zeros(len(SPLITS), np.int64)
        for index, (splits, times) in enumerate(zip(records.splits(assigned), copies, strict=True)):
            save_array(plan.place(DECIDED, index, "npy"), np.stack([splits, times]))
            repeated_counts += np.bincount(splits, times, len(SPLITS)).astype(np.int64)
    return Decided(tuple(repeated_counts.tolist()), records.total, added, leaked)


def codes_of(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[str]]:
    """Texts as numbers, in the order of their first appearance; and the texts."""
    encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()
