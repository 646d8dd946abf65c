"""Exact, order-independent statistics of features, by key, merged over ranges."""

import heapq
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from recipes.contracts.job import BadConfiguration
from recipes.preparation.plan import Plan, read_batches, write_table

# Statistics of numbers that do not depend on their order, nor on how they were shared out: sums are exact whole numbers.

SCALE_BITS = 1074
"""Every 64-bit float is a whole multiple of 2 to the power of minus this."""


@dataclass
class ExactMoments:
    """Of some numbers: how many, their sum times 2^SCALE, that of their squares times 2^(2 SCALE), least and greatest."""

    count: int = 0
    total: int = 0
    squares: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf

    def add(self, number: float) -> None:
        top, bottom = number.as_integer_ratio()
        whole = top << (SCALE_BITS + 1 - bottom.bit_length())
        self.merge(ExactMoments(1, whole, whole * whole, number, number))

    def merge(self, other: "ExactMoments") -> None:
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)

    def aggregate(self, function: str) -> float | int | None:
        """An aggregate by its name; each is the float next to the exact value, and none of no numbers is null.

        Raises:
            BadConfiguration: the sum is beyond what a float can be.
        """
        if function == "count":
            return self.count
        if not self.count:
            return None
        if function == "min":
            return self.minimum
        if function == "max":
            return self.maximum
        if function == "mean":
            return self.total / (self.count << SCALE_BITS)
        if function == "std":  # of the population: that of one number is 0
            return math.isqrt(self.count * self.squares - self.total * self.total) / (self.count << SCALE_BITS)
        try:
            return self.total / (1 << SCALE_BITS)
        except OverflowError:
            raise BadConfiguration("a sum of features.aggregate is beyond 64-bit floats: scale the column before") from None

    def to_json(self) -> list[Any]:
        return [self.count, format(self.total, "x"), format(self.squares, "x"), self.minimum, self.maximum]

    @classmethod
    def from_json(cls, value: list[Any]) -> "ExactMoments":
        count, total, squares, least, most = value
        return cls(count, int(total, 16), int(squares, 16), least, most)


# What all ranges have of each key, put together: tables in the order of the keys, merged up to `fan` at a time.
#
# The tables of all ranges are too many to be open at once: the system maps 65,530 files, which is 1 TB in ranges of 16
# MiB. So a round makes one table of each `fan`, until so few are left that they are read together: of 10 TB after two
# rounds. Of each table a piece is in memory, wherever the keys lie, and a key is read once in each round.

FIT_STAGE = "fit"
MERGED_FOLDER = "merged"
KEY_SCHEMA = pa.schema([("hash", pa.uint64()), ("key", pa.string()), ("fitted", pa.large_binary())])
"""What is known of each key, in the order of the first two columns."""
BATCH_BYTES = 1 << 18
"""Bytes of a table, about, that are in memory at a time: few times `fan`, and worth going to the disk for."""

KeyRow = tuple[int, str, bytes]
"""Of `KEY_SCHEMA`."""


@dataclass(frozen=True)
class KeyStatistics:
    """What is known of a key: the columns of its last record, and the moments of its numbers by their columns."""

    last: Mapping[str, Any]
    moments: Mapping[str, ExactMoments]

    def to_json(self) -> bytes:
        return json.dumps(
            [self.last, {column: statistics.to_json() for column, statistics in self.moments.items()}]
        ).encode()

    @classmethod
    def combine(cls, statistics: Iterable[bytes]) -> Self:
        """Of what ranges have of a key, in the order of the ranges."""
        last: dict[str, Any] = {}
        moments: dict[str, ExactMoments] = defaultdict(ExactMoments)
        for each in statistics:
            last, moments_by_column = json.loads(each)
            for column, numbers in moments_by_column.items():
                moments[column].merge(ExactMoments.from_json(numbers))
        return cls(last, moments)


def write_key_table(path: Path, rows: Iterable[KeyRow]) -> None:
    """Write a table of `KEY_SCHEMA`, of rows in their order; it appears whole or not at all."""
    write_table(path, KEY_SCHEMA, make_batches(rows))


def make_batches(rows: Iterable[KeyRow]) -> Iterator[pa.RecordBatch]:
    held: list[KeyRow] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row[1]) + len(row[2])
        if size >= BATCH_BYTES:
            yield make_batch(held)
            held, size = [], 0
    if held:
        yield make_batch(held)


def make_batch(rows: Sequence[KeyRow]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, KEY_SCHEMA, strict=True)], schema=KEY_SCHEMA
    )


def read_key_rows(table: Path, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for batch in read_batches(table):
        yield from zip(*(column.to_pylist() for column in batch.select(columns).columns), strict=True)


def count_keys(tables: Sequence[Path]) -> int:
    """How many keys tables have together; what was fitted to them is not read."""
    return sum(1 for _ in groupby(heapq.merge(*(read_key_rows(table, ["hash", "key"]) for table in tables))))


def group_by_key(tables: Sequence[Path]) -> Iterator[tuple[int, str, list[bytes]]]:
    """What tables have of each key, in the order of the keys, and of each in the order of the tables."""
    key_columns = itemgetter(0, 1)
    rows = heapq.merge(*(read_key_rows(table, KEY_SCHEMA.names) for table in tables), key=key_columns)
    for (hashed, key), same in groupby(rows, key=key_columns):
        yield hashed, key, [fitted for *_, fitted in same]


def count_tables(plan: Plan, level: int) -> int:
    """At level 0 those of the ranges; after each round one of up to `fan` of the level before."""
    return -(-count_tables(plan, level - 1) // plan.fan) if level else len(plan.ranges)


def final_tables(plan: Plan) -> list[tuple[int, int]]:
    """Level and number of the tables that are few enough to be read together."""
    level = next(level for level in count() if count_tables(plan, level) <= plan.fan)
    return [(level, number) for number in range(count_tables(plan, level))]


def merge_tables(plan: Plan, level: int, number: int) -> Path:
    """Table `number` of a level, made of those before it, which are made if need be, and deleted once it is whole.

    One after the other, so that few of them lie on the disk; those of the ranges stay. Opens `fan` files at a time.
    """
    if level == 0:
        return plan.place(FIT_STAGE, number, "arrow")
    target = plan.place(f"{MERGED_FOLDER}/{level}", number, "arrow")
    if not target.is_file():
        children = range(number * plan.fan, min((number + 1) * plan.fan, count_tables(plan, level - 1)))
        tables = [merge_tables(plan, level - 1, each) for each in children]
        write_key_table(target, map(combine_statistics, group_by_key(tables)))
        for table in tables if level > 1 else ():
            table.unlink()
    return target


def combine_statistics(statistics: tuple[int, str, list[bytes]]) -> KeyRow:
    hashed, key, fitted = statistics
    return hashed, key, fitted[0] if len(fitted) == 1 else KeyStatistics.combine(fitted).to_json()
