"""Sort encoded records into the shuffled parts of each split."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recipes.preparation import encode_stage
from recipes.preparation.deduplication import digest_words
from recipes.preparation.plan import Plan, atomic_path, open_table, write_table
from recipes.preparation.shuffle_plan import Bucket, ShufflePlan, mix_bits
from recipes.preparation.sorted_runs import (
    BATCH_RECORDS,
    ORDER_FIELDS,
    open_runs,
    records_per_batch,
    run_file,
    run_files,
    sort_slices,
    write_run,
)
from recipes.preparation.split_assignment import SPLITS
from recipes.preparation.split_stage import SPLIT_STAGE
from recipes.preparation.tokenization.record_tokenizer import TOKEN_FIELDS

PARTS_FOLDER = "parts"
COMPUTED_STAGE = "computed"
"""Where features were asked for: the encoded records with them."""
HASHES_FOLDER = "known_by"
"""Of each record of a part: the hash of what it was made of, and its own fingerprint's two, for the index."""
HASH_COLUMNS = ("source", "own", "said")
KEPT_COLUMNS = ("record", *HASH_COLUMNS)
LINES_PER_WRITE = 256
"""Texts that are copied together, which may be long."""

PartCounts = tuple[int, ...]
"""How many parts each split of `SPLITS` has."""


def scatter_range(plan: Plan, parts: PartCounts, shuffle: ShufflePlan, index: int) -> None:
    """Sort range `index` by part and order, each record as often as was decided."""
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
        """One after the other: where a class is repeated often, all of them are many times the range."""
        for begin in range(0, len(order), step):
            chosen = order[begin : begin + step]
            places = (key[chosen], np.full(len(chosen), index), part[chosen])
            columns = [pa.array(place, field.type) for place, field in zip(places, ORDER_FIELDS, strict=True)]
            yield from pa.table([*wanted.take(pa.array(rows[chosen])).columns, *columns], schema).to_batches()

    write_run(target, schema, starts, batches())


def compute_order_keys(plan: Plan, index: int, digests: NDArray[np.uint64], rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The place of each record in the order: drawn from what it says and which copy it is, or the input's.

    Where equal records stay, each is drawn by its place too: else they would all stand in a row.
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
    """Which part of its split a record is in: the parts share the keys, or the ranges, evenly."""
    if plan.parameters.augment.shuffle_seed is None:
        return (np.uint64(index) * parts // np.uint64(len(plan.ranges))).astype(np.int64)
    return (((key >> np.uint64(32)) * parts) >> np.uint64(32)).astype(np.int64)


def part_name(parts: PartCounts, number: int) -> tuple[str, str]:
    """The split of part `number` of all parts, and the name of its files."""
    split = int(np.searchsorted(np.cumsum(parts), number, side="right"))
    return SPLITS[split], f"{SPLITS[split]}-{number - sum(parts[:split]):05}"


def gather_part(plan: Plan, parts: PartCounts, bucket: Bucket, number: int) -> int:
    """Write part `number` of all parts, of a bucket that is ready: its texts and tokens. Returns how many records it has."""
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
        # Not beside the records: it is of their index, and not of the dataset. Before them: where they are, all is done.
        hashes = [table.column(column).take(order).to_numpy() for column in HASH_COLUMNS]
        with atomic_path(plan.work / HASHES_FOLDER / split / f"{name}.npy") as known, known.open("wb") as file:
            np.save(file, np.column_stack(hashes))
    return len(table)


def write_lines(path: Path, records: pa.ChunkedArray, order: pa.Array) -> None:
    """One record a line."""
    combined = records.combine_chunks()
    with path.open("wb") as file:
        for begin in range(0, len(order), LINES_PER_WRITE):
            chosen = combined.take(order[begin : begin + LINES_PER_WRITE]).to_pylist()
            file.write(b"\n".join([*chosen, b""]))
