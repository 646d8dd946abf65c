"""What all ranges have of each key, put together: tables in the order of the keys, merged up to `fan` at a time.

The tables of all ranges are too many to be open at once: the system maps 65,530 files, which is 1 TB in ranges of 16 MiB.
So a round makes one table of each `fan`, until so few are left that they are read together: of 10 TB after two rounds. Of
each table a piece is in memory, wherever the keys lie, and a key is read once in each round.
"""

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from recipes.preparation.moments import Moments
from recipes.preparation.plan import Plan
from recipes.preparation.tables import read_batches, write_table

FIT = "fit"
MERGED = "merged"
KEYS = pa.schema([("hash", pa.uint64()), ("key", pa.string()), ("fitted", pa.large_binary())])
"""What is known of each key, in the order of the first two columns."""
PIECE = 1 << 18
"""Bytes of a table, about, that are in memory at a time: few times `fan`, and worth going to the disk for."""

Row = tuple[int, str, bytes]
"""Of `KEYS`."""


@dataclass(frozen=True)
class Fitted:
    """What is known of a key: the columns of its last record, and the moments of its numbers by their columns."""

    last: Mapping[str, Any]
    moments: Mapping[str, Moments]

    def to_json(self) -> bytes:
        return json.dumps([self.last, {column: found.to_json() for column, found in self.moments.items()}]).encode()

    @classmethod
    def together(cls, found: Iterable[bytes]) -> Self:
        """Of what ranges have of a key, in the order of the ranges."""
        last: dict[str, Any] = {}
        moments: dict[str, Moments] = defaultdict(Moments)
        for each in found:
            last, given = json.loads(each)
            for column, numbers in given.items():
                moments[column].merge(Moments.from_json(numbers))
        return cls(last, moments)


def write_keys(path: Path, rows: Iterable[Row]) -> None:
    """Write a table of `KEYS`, of rows in their order; it appears whole or not at all."""
    write_table(path, KEYS, pieces(rows))


def pieces(rows: Iterable[Row]) -> Iterator[pa.RecordBatch]:
    held: list[Row] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row[1]) + len(row[2])
        if size >= PIECE:
            yield batch_of(held)
            held, size = [], 0
    if held:
        yield batch_of(held)


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.record_batch([pa.array(column, field.type) for column, field in zip(columns, KEYS, strict=True)], schema=KEYS)


def rows_of(table: Path, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for batch in read_batches(table):
        yield from zip(*(column.to_pylist() for column in batch.select(columns).columns), strict=True)


def count_keys(tables: Sequence[Path]) -> int:
    """How many keys tables have together; what was fitted to them is not read."""
    return sum(1 for _ in groupby(heapq.merge(*(rows_of(table, ["hash", "key"]) for table in tables))))


def by_key(tables: Sequence[Path]) -> Iterator[tuple[int, str, list[bytes]]]:
    """What tables have of each key, in the order of the keys, and of each in the order of the tables."""
    known_by = itemgetter(0, 1)
    rows = heapq.merge(*(rows_of(table, KEYS.names) for table in tables), key=known_by)
    for (hashed, key), same in groupby(rows, key=known_by):
        yield hashed, key, [fitted for *_, fitted in same]


def count_tables(plan: Plan, level: int) -> int:
    """At level 0 those of the ranges; after each round one of up to `fan` of the level before."""
    return -(-count_tables(plan, level - 1) // plan.fan) if level else len(plan.ranges)


def last_tables(plan: Plan) -> list[tuple[int, int]]:
    """Level and number of the tables that are few enough to be read together."""
    level = next(level for level in count() if count_tables(plan, level) <= plan.fan)
    return [(level, number) for number in range(count_tables(plan, level))]


def merge(plan: Plan, level: int, number: int) -> Path:
    """Table `number` of a level, made of those before it, which are made if need be, and deleted once it is whole.

    One after the other, so that few of them lie on the disk; those of the ranges stay. Opens `fan` files at a time.
    """
    if level == 0:
        return plan.place(FIT, number, "arrow")
    target = plan.place(f"{MERGED}/{level}", number, "arrow")
    if not target.is_file():
        before = range(number * plan.fan, min((number + 1) * plan.fan, count_tables(plan, level - 1)))
        tables = [merge(plan, level - 1, each) for each in before]
        write_keys(target, map(put_together, by_key(tables)))
        for table in tables if level > 1 else ():
            table.unlink()
    return target


def put_together(found: tuple[int, str, list[bytes]]) -> Row:
    hashed, key, fitted = found
    return hashed, key, fitted[0] if len(fitted) == 1 else Fitted.together(fitted).to_json()
