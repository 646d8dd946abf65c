"""Write and merge sorted runs of the external sort, and exchange them between pods."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recipes.preparation.plan import Plan, atomic_path, open_table, write_table
from recipes.preparation.shuffle_plan import Bucket, ShufflePlan
from recipes.preparation.workers import Pods

# Sorted runs: Arrow files of records in the order of the shuffle, which know where each bucket of parts begins.

KEY_COLUMN, RANGE_COLUMN, PART_COLUMN = "key", "range", "part"
ORDER_FIELDS = (pa.field(KEY_COLUMN, pa.uint64()), pa.field(RANGE_COLUMN, pa.int32()), pa.field(PART_COLUMN, pa.int32()))
"""By what a record has its place, besides where it stood in its range: which part, the key within it, and the range.

The range decides between equal keys: so it does not matter through which files a record came.
"""
STARTS_KEY = b"starts"
BATCH_RECORDS, BATCH_BYTES = 8192, 1 << 20
"""Records that are written together: so many, or so many bytes of them."""


def write_run(path: Path, schema: pa.Schema, starts: NDArray[np.int64], batches: Iterable[pa.RecordBatch]) -> None:
    """Write a run; `starts` has the first record of each bucket, and how many there are."""
    write_table(path, schema.with_metadata({STARTS_KEY: starts.astype("<i8").tobytes()}), batches)


def records_per_batch(size: int, count: int) -> int:
    """How many of `count` records that have `size` bytes together are written together."""
    return max(1, min(BATCH_RECORDS, BATCH_BYTES * count // max(size, 1)))


class SortedRun:
    """A run, which stays on the disk."""

    def __init__(self, path: Path) -> None:
        self.table = open_table(path)
        self._starts = np.frombuffer(self.table.schema.metadata[STARTS_KEY], "<i8")
        self.record_bytes = path.stat().st_size / max(len(self.table), 1)

    def bucket_slice(self, number: int) -> pa.Table:
        """What it has for a bucket."""
        return self.table[self._starts[number] : self._starts[number + 1]]


@lru_cache(maxsize=1)
def open_runs(paths: tuple[Path, ...]) -> list[SortedRun]:
    """Runs, which this process keeps open for the next parts of the same bucket."""
    return [SortedRun(path) for path in paths]


def sort_slices(slices: list[pa.Table]) -> tuple[pa.Table, pa.Array]:
    """Slices of runs as one table, and its rows in their order."""
    table = pa.concat_tables(slices)
    return table, pa.array(np.lexsort([table.column(name).to_numpy() for name in (RANGE_COLUMN, KEY_COLUMN, PART_COLUMN)]))


def merge_slices(slices: list[pa.Table], record_bytes: list[float], most: int) -> Iterator[pa.RecordBatch]:
    """The records of slices in one order. No more than `most` bytes, or a part, are in memory at a time.

    Args:
        record_bytes: of a record of each slice, about. What some ranges have may be for a few parts alone, and then is much.
    """
    found = [np.unique(part.column(PART_COLUMN).to_numpy(), return_index=True) for part in slices]
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
        table, order = sort_slices(pieces)
        yield from table.combine_chunks().take(order).to_batches(max_chunksize=records_per_batch(int(size), len(table)))
        first, size = end, 0.0


# From the runs of a bucket to those of smaller buckets, in one pod or in all of them.

SCATTER_STAGE = "scatter"
SPREAD_FOLDER = "spread"


def run_file(plan: Plan, bucket: Bucket, number: int) -> Path:
    """Where run `number` of a bucket lies: what a range has, or what a group of runs of a larger bucket had for it."""
    if bucket.level == 0:
        return plan.place(SCATTER_STAGE, number, "arrow")
    return plan.work / SPREAD_FOLDER / f"{bucket.level}" / f"{bucket.first:06}" / f"{number:06}.arrow"


def run_files(plan: Plan, bucket: Bucket) -> tuple[Path, ...]:
    return tuple(run_file(plan, bucket, number) for number in range(bucket.files))


def spread_marker(plan: Plan, level: int, first: int, group: int) -> Path:
    """Left when a group of runs of a bucket was spread."""
    return plan.work / SPREAD_FOLDER / f"{level}" / f"{first:06}" / f"{group:06}.done"


def spread_group(plan: Plan, shuffle: ShufflePlan, bucket: Bucket, group: int) -> None:
    """Write what group `group` of a bucket's runs has for each smaller bucket, as a run of that."""
    done = spread_marker(plan, bucket.level, bucket.first, group)
    if done.is_file():
        return
    runs = [SortedRun(run_file(plan, bucket, number)) for number in shuffle.groups(bucket)[group]]
    for number, smaller in enumerate(shuffle.child_buckets(bucket)):
        slices = [run.bucket_slice(number) for run in runs]
        borders = shuffle.boundaries(smaller)
        starts = sum(np.searchsorted(part.column(PART_COLUMN).to_numpy(), borders) for part in slices)
        records = merge_slices(slices, [run.record_bytes for run in runs], plan.part_bytes)
        write_run(run_file(plan, smaller, group), runs[0].table.schema, np.asarray(starts), records)
    with atomic_path(done) as part:
        part.touch()


def exchange_runs(
    plan: Plan, shuffle: ShufflePlan, pods: Pods, groups: Sequence[int], wanted: Sequence[int]
) -> list[Bucket]:
    """Give the pods what groups of this one's ranges have for them, and take all runs of the buckets with wanted parts.

    Returns these.
    """
    buckets = shuffle.child_buckets(shuffle.root)
    mine = {bucket for bucket in buckets if bisect_left(wanted, bucket.first) < bisect_left(wanted, bucket.end)}
    for group in groups:
        runs = {path: bucket for bucket in buckets if (path := run_file(plan, bucket, group)).is_file()}
        pods.publish_all([path] for path in runs)  # another was given before this pod was started again
        for path, bucket in runs.items():
            if bucket not in mine:
                path.unlink()
        pods.publish(spread_marker(plan, 0, 0, group))
    pods.fetch(path for bucket in mine for path in run_files(plan, bucket))
    return sorted(mine, key=lambda bucket: bucket.first)
