"""Shuffle records into the parts of each split by merging sorted runs between pods."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recipes.preparation import encode_stage
from recipes.preparation.deduplication import digest_words
from recipes.preparation.plan import Plan, atomic_path, open_table, write_table
from recipes.preparation.shuffle_plan import Bucket, ShufflePlan, mix_bits
from recipes.preparation.split_assignment import SPLITS
from recipes.preparation.split_stage import SPLIT_STAGE
from recipes.preparation.tokenization.record_tokenizer import TOKEN_FIELDS
from recipes.preparation.workers import Pods

# Sorted runs: Arrow files with records in shuffle order and the start of each bucket of parts.

KEY_COLUMN, RANGE_COLUMN, PART_COLUMN = "key", "range", "part"
ORDER_FIELDS = (pa.field(KEY_COLUMN, pa.uint64()), pa.field(RANGE_COLUMN, pa.int32()), pa.field(PART_COLUMN, pa.int32()))
"""Columns that define a record's position, in addition to its line in the range: part, key within the part, and range.

The range breaks ties, so that the order does not depend on the files that a record passed through.
"""
STARTS_KEY = b"starts"
BATCH_RECORDS, BATCH_BYTES = 8192, 1 << 20
"""Maximum records, and approximate bytes, per batch."""


def write_run(path: Path, schema: pa.Schema, starts: NDArray[np.int64], batches: Iterable[pa.RecordBatch]) -> None:
    """Write a run; `starts` holds the first record of each bucket, and the total."""
    write_table(path, schema.with_metadata({STARTS_KEY: starts.astype("<i8").tobytes()}), batches)


def records_per_batch(size: int, count: int) -> int:
    """Return the number of records per batch for `count` records of `size` bytes in total."""
    return max(1, min(BATCH_RECORDS, BATCH_BYTES * count // max(size, 1)))


class SortedRun:
    """A memory-mapped run."""

    def __init__(self, path: Path) -> None:
        self.table = open_table(path)
        self._starts = np.frombuffer(self.table.schema.metadata[STARTS_KEY], "<i8")
        self.record_bytes = path.stat().st_size / max(len(self.table), 1)

    def bucket_slice(self, number: int) -> pa.Table:
        """Return the run's records for a bucket."""
        return self.table[self._starts[number] : self._starts[number + 1]]


@lru_cache(maxsize=1)
def open_runs(paths: tuple[Path, ...]) -> list[SortedRun]:
    """Open runs; the process keeps them open for further parts of the same bucket."""
    return [SortedRun(path) for path in paths]


def sort_slices(slices: list[pa.Table]) -> tuple[pa.Table, pa.Array]:
    """Concatenate slices of runs, and return the sorted order of the rows."""
    table = pa.concat_tables(slices)
    return table, pa.array(np.lexsort([table.column(name).to_numpy() for name in (RANGE_COLUMN, KEY_COLUMN, PART_COLUMN)]))


def merge_slices(slices: list[pa.Table], record_bytes: list[float], most: int) -> Iterator[pa.RecordBatch]:
    """Yield the records of slices in sorted order.

    At most `most` bytes, or one part, are in memory.

    Args:
        record_bytes: average record size of each slice. A range may have records for a few parts only, and then many.
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


# From the runs of a bucket to the runs of its children, within a pod or across all pods.

SCATTER_STAGE = "scatter"
SPREAD_FOLDER = "spread"


def run_file(plan: Plan, bucket: Bucket, number: int) -> Path:
    """Return the path of a bucket's run.

    A range's at level 0, or a group's share of a larger bucket.
    """
    if bucket.level == 0:
        return plan.place(SCATTER_STAGE, number, "arrow")
    return plan.work / SPREAD_FOLDER / f"{bucket.level}" / f"{bucket.first:06}" / f"{number:06}.arrow"


def run_files(plan: Plan, bucket: Bucket) -> tuple[Path, ...]:
    return tuple(run_file(plan, bucket, number) for number in range(bucket.files))


def spread_marker(plan: Plan, level: int, first: int, group: int) -> Path:
    """Return the marker of a group of runs that was spread."""
    return plan.work / SPREAD_FOLDER / f"{level}" / f"{first:06}" / f"{group:06}.done"


def spread_group(plan: Plan, shuffle: ShufflePlan, bucket: Bucket, group: int) -> None:
    """Write a group's records as one run per child bucket."""
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
    """Publish this pod's runs for other pods, and fetch those for the wanted parts.

    Returns these buckets.
    """
    buckets = shuffle.child_buckets(shuffle.root)
    mine = {bucket for bucket in buckets if bisect_left(wanted, bucket.first) < bisect_left(wanted, bucket.end)}
    for group in groups:
        runs = {path: bucket for bucket in buckets if (path := run_file(plan, bucket, group)).is_file()}
        pods.publish_all([path] for path in runs)  # the rest was published before a restart of this pod
        for path, bucket in runs.items():
            if bucket not in mine:
                path.unlink()
        pods.publish(spread_marker(plan, 0, 0, group))
    pods.fetch(path for bucket in mine for path in run_files(plan, bucket))
    return sorted(mine, key=lambda bucket: bucket.first)


PARTS_FOLDER = "parts"
COMPUTED_STAGE = "computed"
"""Stage with encoded records and their features, if features are configured."""
HASHES_FOLDER = "known_by"
"""Folder with each record's hashes for the index: of its source record, and its own two."""
HASH_COLUMNS = ("source", "own", "said")
KEPT_COLUMNS = ("record", *HASH_COLUMNS)
LINES_PER_WRITE = 256
"""Number of texts copied together, which may be long."""

PartCounts = tuple[int, ...]
"""Number of parts of each split in `SPLITS`."""


def scatter_range(plan: Plan, parts: PartCounts, shuffle: ShufflePlan, index: int) -> None:
    """Sort range `index` by part and key, repeating each record by its copies."""
    target = run_file(plan, shuffle.root, index)
    if target.is_file():
        return
    table = open_table(plan.place(COMPUTED_STAGE if plan.parameters.features else encode_stage.STAGE, index, "arrow"))
    splits, copies = np.load(plan.place(SPLIT_STAGE, index, "npy"))
    rows = np.repeat(np.arange(len(table)), copies)
    split = splits[rows].astype(np.int64)
    key = compute_order_keys(plan, index, digest_words(table.column("digest"))[rows], rows)
    part = np.array([0, *np.cumsum(parts)[:-1]])[split] + assign_parts(
        plan, index, key, np.array(parts, dtype=np.uint64)[split]
    )
    order = np.lexsort((rows, key, part))
    starts = np.searchsorted(part[order], shuffle.boundaries(shuffle.root))
    wanted = table.drop_columns(
        [name for name, _ in encode_stage.RECORD_FIELDS if name not in KEPT_COLUMNS]
    ).combine_chunks()
    schema = pa.schema([*wanted.schema, *ORDER_FIELDS])
    step = records_per_batch(wanted.nbytes, len(wanted))

    def batches() -> Iterator[pa.RecordBatch]:
        """One batch at a time.

        With oversampling, the records may be a multiple of the range.
        """
        for begin in range(0, len(order), step):
            chosen = order[begin : begin + step]
            places = (key[chosen], np.full(len(chosen), index), part[chosen])
            columns = [pa.array(place, field.type) for place, field in zip(places, ORDER_FIELDS, strict=True)]
            yield from pa.table([*wanted.take(pa.array(rows[chosen])).columns, *columns], schema).to_batches()

    write_run(target, schema, starts, batches())


def compute_order_keys(plan: Plan, index: int, digests: NDArray[np.uint64], rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return each record's sort key.

    Random, from its content and copy number, or the input's order. If duplicates are kept, the key also depends on their
    position: otherwise they would all be adjacent.
    """
    seed = plan.parameters.augment.shuffle_seed
    if seed is None:
        return (np.uint64(index) << np.uint64(32)) | rows.astype(np.uint64)
    copy = (np.arange(len(rows)) - np.searchsorted(rows, rows)).astype(np.uint64)
    drawn = mix_bits(digests[:, 0], seed) ^ digests[:, 1] ^ copy
    if not plan.parameters.filter.dedup:
        drawn ^= mix_bits((np.uint64(index) << np.uint64(32)) | rows.astype(np.uint64), seed)
    return mix_bits(drawn, seed)


def assign_parts(plan: Plan, index: int, key: NDArray[np.uint64], parts: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the part of each record in its split, by dividing keys or ranges evenly."""
    if plan.parameters.augment.shuffle_seed is None:
        return (np.uint64(index) * parts // np.uint64(len(plan.ranges))).astype(np.int64)
    return (((key >> np.uint64(32)) * parts) >> np.uint64(32)).astype(np.int64)


def part_name(parts: PartCounts, number: int) -> tuple[str, str]:
    """Return the split of a part, and the name of its files."""
    split = int(np.searchsorted(np.cumsum(parts), number, side="right"))
    return SPLITS[split], f"{SPLITS[split]}-{number - sum(parts[:split]):05}"


def gather_part(plan: Plan, parts: PartCounts, bucket: Bucket, number: int) -> int:
    """Write a part's texts and tokens from a ready bucket. Returns its number of records."""
    split, name = part_name(parts, number)
    texts = plan.work / PARTS_FOLDER / split / f"{name}.jsonl"
    slices = [run.bucket_slice(number - bucket.first) for run in open_runs(run_files(plan, bucket))]
    if texts.is_file():
        return sum(map(len, slices))
    table, order = sort_slices(slices)
    if plan.parameters.tokenize is not None:
        columns = [column for column, _ in TOKEN_FIELDS]
        tokens = table.select(columns).combine_chunks().take(order)
        write_table(
            texts.with_suffix(".arrow"), pa.schema(list(TOKEN_FIELDS)), tokens.to_batches(max_chunksize=BATCH_RECORDS)
        )
    with atomic_path(texts) as part_file:
        write_lines(part_file, table.column("record"), order)
        # Not next to the records: hashes belong to the index, not to the dataset. Written first, as the records mark
        # completion.
        hashes = [table.column(column).take(order).to_numpy() for column in HASH_COLUMNS]
        with atomic_path(plan.work / HASHES_FOLDER / split / f"{name}.npy") as known, known.open("wb") as file:
            np.save(file, np.column_stack(hashes))
    return len(table)


def write_lines(path: Path, records: pa.ChunkedArray, order: pa.Array) -> None:
    """Write one record per line."""
    combined = records.combine_chunks()
    with path.open("wb") as file:
        for begin in range(0, len(order), LINES_PER_WRITE):
            chosen = combined.take(order[begin : begin + LINES_PER_WRITE]).to_pylist()
            file.write(b"\n".join([*chosen, b""]))
