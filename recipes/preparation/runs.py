"""Sorted runs: Arrow files of records in the order of the shuffle, which know where each bucket of parts begins."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recipes.preparation.tables import open_table, write_table

KEY, RANGE, PART = "key", "range", "part"
ORDER = (pa.field(KEY, pa.uint64()), pa.field(RANGE, pa.int32()), pa.field(PART, pa.int32()))
"""By what a record has its place, besides where it stood in its range: which part, the key within it, and the range.

The range decides between equal keys: so it does not matter through which files a record came.
"""
STARTS = b"starts"
BATCH, BATCH_BYTES = 8192, 1 << 20
"""Records that are written together: so many, or so many bytes of them."""


def write_run(path: Path, schema: pa.Schema, starts: NDArray[np.int64], batches: Iterable[pa.RecordBatch]) -> None:
    """Write a run; `starts` has the first record of each bucket, and how many there are."""
    write_table(path, schema.with_metadata({STARTS: starts.astype("<i8").tobytes()}), batches)


def at_once(size: int, count: int) -> int:
    """How many of `count` records that have `size` bytes together are written together."""
    return max(1, min(BATCH, BATCH_BYTES * count // max(size, 1)))


class Run:
    """A run, which stays on the disk."""

    def __init__(self, path: Path) -> None:
        self.table = open_table(path)
        self._starts = np.frombuffer(self.table.schema.metadata[STARTS], "<i8")
        self.record_bytes = path.stat().st_size / max(len(self.table), 1)

    def of(self, number: int) -> pa.Table:
        """What it has for a bucket."""
        return self.table[self._starts[number] : self._starts[number + 1]]


@lru_cache(maxsize=1)
def open_runs(paths: tuple[Path, ...]) -> list[Run]:
    """Runs, which this process keeps open for the next parts of the same bucket."""
    return [Run(path) for path in paths]


def in_order(slices: list[pa.Table]) -> tuple[pa.Table, pa.Array]:
    """Slices of runs as one table, and its rows in their order."""
    table = pa.concat_tables(slices)
    return table, pa.array(np.lexsort([table.column(name).to_numpy() for name in (RANGE, KEY, PART)]))


def merged(slices: list[pa.Table], record_bytes: list[float], most: int) -> Iterator[pa.RecordBatch]:
    """The records of slices in one order. No more than `most` bytes, or a part, are in memory at a time.

    Args:
        record_bytes: of a record of each slice, about. What some ranges have may be for a few parts alone, and then is much.
    """
    found = [np.unique(part.column(PART).to_numpy(), return_index=True) for part in slices]
    numbers, place = np.unique(np.concatenate([parts for parts, _ in found]), return_inverse=True)
    counts = [np.diff([*starts, len(part)]) for part, (_, starts) in zip(slices, found, strict=True)]
    sizes = np.bincount(place, np.concatenate([count * each for count, each in zip(counts, record_bytes, strict=True)]))
    first, size = 0, 0.0
    for end in range(1, len(numbers) + 1):
        size += sizes[end - 1]
        if end < len(numbers) and size + sizes[end] <= most:
            continue
        pieces = []
        for part, (parts, starts) in zip(slices, found, strict=True):
            begins = [*starts, len(part)]
            low, high = np.searchsorted(parts, numbers[first]), np.searchsorted(parts, numbers[end - 1], side="right")
            pieces.append(part[begins[low] : begins[high]])
        table, order = in_order(pieces)
        yield from table.combine_chunks().take(order).to_batches(max_chunksize=at_once(int(size), len(table)))
        first, size = end, 0.0
