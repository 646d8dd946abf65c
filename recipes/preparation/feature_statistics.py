"""Exact, order-independent feature statistics by key, merged over ranges."""

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

# Statistics that depend neither on the order of numbers nor on their distribution: sums are exact integers.

SCALE_BITS = 1074
"""Every 64-bit float is an integer multiple of 2 to the power of minus this."""


@dataclass
class ExactMoments:
    """Exact moments of numbers.

    `total` is their sum times 2^SCALE_BITS, `squares` that of squares times 2^(2 SCALE_BITS).
    """

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
        """Return an aggregate by name, rounded to the nearest float; None without numbers.

        Raises:
            BadConfiguration: the sum exceeds the range of floats.
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
        if function == "std":  # population standard deviation: 0 for a single number
            return math.isqrt(self.count * self.squares - self.total * self.total) / (self.count << SCALE_BITS)
        try:
            return self.total / (1 << SCALE_BITS)
        except OverflowError:
            raise BadConfiguration("a sum of features.aggregate exceeds 64-bit floats: scale the column first") from None

    def to_json(self) -> list[Any]:
        return [self.count, format(self.total, "x"), format(self.squares, "x"), self.minimum, self.maximum]

    @classmethod
    def from_json(cls, value: list[Any]) -> "ExactMoments":
        count, total, squares, least, most = value
        return cls(count, int(total, 16), int(squares, 16), least, most)


# Statistics of all ranges per key: sorted tables, merged up to `fan` at a time.
#
# The tables of all ranges are too many to open at once: the system maps 65,530 files, which is 1 TB in ranges of 16 MiB. So
# each round merges groups of `fan` tables, until few enough remain to be read together: two rounds for 10 TB. One batch of
# each table is in memory, and each key is read once per round.

FIT_STAGE = "fit"
MERGED_FOLDER = "merged"
KEY_SCHEMA = pa.schema([("hash", pa.uint64()), ("key", pa.string()), ("fitted", pa.large_binary())])
"""Statistics by key, sorted by the first two columns."""
BATCH_BYTES = 1 << 18
"""Approximate bytes of a table in memory: small enough times `fan`, and large enough for efficient disk reads."""

KeyRow = tuple[int, str, bytes]
"""A row of `KEY_SCHEMA`."""


@dataclass(frozen=True)
class KeyStatistics:
    """Statistics of a key.

    Columns of its last record, and moments of its numbers by column.
    """

    last: Mapping[str, Any]
    moments: Mapping[str, ExactMoments]

    def to_json(self) -> bytes:
        return json.dumps(
            [self.last, {column: statistics.to_json() for column, statistics in self.moments.items()}]
        ).encode()

    @classmethod
    def combine(cls, statistics: Iterable[bytes]) -> Self:
        """Combine the statistics of several ranges, in the order of the ranges."""
        last: dict[str, Any] = {}
        moments: dict[str, ExactMoments] = defaultdict(ExactMoments)
        for each in statistics:
            last, moments_by_column = json.loads(each)
            for column, numbers in moments_by_column.items():
                moments[column].merge(ExactMoments.from_json(numbers))
        return cls(last, moments)


def write_key_table(path: Path, rows: Iterable[KeyRow]) -> None:
    """Write sorted rows as a table of `KEY_SCHEMA`, atomically."""
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
    """Return the number of distinct keys in tables, without reading their statistics."""
    return sum(1 for _ in groupby(heapq.merge(*(read_key_rows(table, ["hash", "key"]) for table in tables))))


def group_by_key(tables: Sequence[Path]) -> Iterator[tuple[int, str, list[bytes]]]:
    """Yield each key's statistics from all tables, in the order of keys and of tables."""
    key_columns = itemgetter(0, 1)
    rows = heapq.merge(*(read_key_rows(table, KEY_SCHEMA.names) for table in tables), key=key_columns)
    for (hashed, key), same in groupby(rows, key=key_columns):
        yield hashed, key, [fitted for *_, fitted in same]


def count_tables(plan: Plan, level: int) -> int:
    """Return the number of tables.

    One per range at level 0, a `fan`th of the previous level's after.
    """
    return -(-count_tables(plan, level - 1) // plan.fan) if level else len(plan.ranges)


def final_tables(plan: Plan) -> list[tuple[int, int]]:
    """Return level and number of the tables that are few enough to be read together."""
    level = next(level for level in count() if count_tables(plan, level) <= plan.fan)
    return [(level, number) for number in range(count_tables(plan, level))]


def merge_tables(plan: Plan, level: int, number: int) -> Path:
    """Merge a table from those of the previous level.

    Missing ones are created, and all are deleted afterwards.

    Recursive, depth first, so that few tables are on disk; the ranges' tables are kept. Opens `fan` files at a time.
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
