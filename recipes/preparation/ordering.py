"""Last stages: encoded records -> the parts of each split, in the order of the shuffle.

An external sort: each range is sorted by itself and lies ready for the parts (`scatter`); each part takes its slice of every
range and sorts that (`gather`). Neither ever holds more than a range or a part in memory.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recipes.assignment import SPLITS
from recipes.preparation import encoding
from recipes.preparation.duplicates import halves
from recipes.preparation.hashing import mixed
from recipes.preparation.plan import Plan, written
from recipes.preparation.tables import open_table, write_table
from recipes.preparation.tokens import TOKEN_FIELDS

STAGE = "scatter"
SLICES = "slices"
PARTS = "parts"
DECIDED = "decided"
COMPUTED = "computed"
"""Where features were asked for: the encoded records with them."""
KEY = "key"
KNOWN_BY = "known_by"
"""Of each record of a part: the hash of what it was made of, and its own fingerprint's two, for the index."""
HASHES = ("source", "own", "said")
KEPT = ("record", *HASHES)
BATCH, LINES = 8192, 256
"""Records that are copied together: of tokens, and of texts, which may be long."""

Parts = tuple[int, ...]
"""How many parts each split of `SPLITS` has."""


def scatter(plan: Plan, parts: Parts, index: int) -> None:
    """Sort range `index` by part and order, each record as often as was decided."""
    starts_file = plan.place(STAGE, index, "npy")
    if starts_file.is_file():
        return
    table = open_table(plan.place(COMPUTED if plan.parameters.features else encoding.STAGE, index, "arrow"))
    splits, copies = np.load(plan.place(DECIDED, index, "npy"))
    rows = np.repeat(np.arange(len(table)), copies)
    split = splits[rows].astype(np.int64)
    key = order_keys(plan, index, halves(table.column("digest"))[rows], rows)
    part = np.array([0, *np.cumsum(parts)[:-1]])[split] + part_of(plan, index, key, np.array(parts, dtype=np.uint64)[split])
    order = np.lexsort((rows, key, part))
    starts = np.searchsorted(part[order], np.arange(sum(parts) + 1))
    wanted = table.drop_columns([name for name, _ in encoding.FIELDS if name not in KEPT]).combine_chunks()
    schema = wanted.schema.append(pa.field(KEY, pa.uint64()))

    def batches() -> Iterator[pa.RecordBatch]:
        """One after the other: where a class is repeated often, all of them are many times the range."""
        for begin in range(0, len(order), LINES):
            chosen = order[begin : begin + LINES]
            taken = wanted.take(pa.array(rows[chosen])).append_column(KEY, pa.array(key[chosen]))
            yield from taken.to_batches()

    write_table(plan.place(STAGE, index, "arrow"), schema, batches())
    with written(starts_file) as part_file, part_file.open("wb") as file:
        np.save(file, starts)


def order_keys(plan: Plan, index: int, digests: NDArray[np.uint64], rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The place of each record in the order: drawn from what it says and which copy it is, or the input's.

    Where equal records stay, each is drawn by its place too: else they would all stand in a row.
    """
    seed = plan.parameters.augment.shuffle_seed
    if seed is None:
        return (np.uint64(index) << np.uint64(32)) | rows.astype(np.uint64)
    copy = (np.arange(len(rows)) - np.searchsorted(rows, rows)).astype(np.uint64)
    drawn = mixed(digests[:, 0], seed) ^ digests[:, 1] ^ copy
    if not plan.parameters.filter.dedup:
        drawn ^= mixed((np.uint64(index) << np.uint64(32)) | rows.astype(np.uint64), seed)
    return mixed(drawn, seed)


def part_of(plan: Plan, index: int, key: NDArray[np.uint64], parts: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Which part of its split a record is in: the parts share the keys, or the ranges, evenly."""
    if plan.parameters.augment.shuffle_seed is None:
        return (np.uint64(index) * parts // np.uint64(len(plan.ranges))).astype(np.int64)
    return (((key >> np.uint64(32)) * parts) >> np.uint64(32)).astype(np.int64)


def slice_of(plan: Plan, index: int, rank: int) -> Path:
    """Where the records of range `index` lie on their way to the pod that writes their parts."""
    return plan.work / SLICES / f"{index:05}-{rank:03}.arrow"


def cut_slice(plan: Plan, index: int, first: int, end: int, target: Path) -> None:
    """What a scattered range has for parts `first` to before `end`, as if it were all of it."""
    starts = np.load(plan.place(STAGE, index, "npy"))
    low, high = starts[first], starts[end]
    table = open_table(plan.place(STAGE, index, "arrow"))[low:high]
    write_table(target, table.schema, table.to_batches())
    with written(target.with_suffix(".npy")) as part, part.open("wb") as file:
        np.save(file, np.clip(starts, low, high) - low)


def name_of(parts: Parts, number: int) -> tuple[str, str]:
    """The split of part `number` of all parts, and the name of its files."""
    split = int(np.searchsorted(np.cumsum(parts), number, side="right"))
    return SPLITS[split], f"{SPLITS[split]}-{number - sum(parts[:split]):05}"


def gather(plan: Plan, parts: Parts, number: int) -> int:
    """Write part `number` of all parts, its texts and its tokens. Returns how many records it has."""
    split, name = name_of(parts, number)
    texts = plan.work / PARTS / split / f"{name}.jsonl"
    slices = []
    for index in range(len(plan.ranges)):
        starts = np.load(plan.place(STAGE, index, "npy"))
        slices.append(open_table(plan.place(STAGE, index, "arrow"))[starts[number] : starts[number + 1]])
    table = pa.concat_tables(slices)
    if texts.is_file():
        return len(table)
    order = pa.array(np.argsort(table.column(KEY).to_numpy(), kind="stable"))
    if plan.parameters.tokenize is not None:
        columns = [column for column, _ in TOKEN_FIELDS]
        tokens = table.select(columns).combine_chunks().take(order)
        write_table(texts.with_suffix(".arrow"), pa.schema(list(TOKEN_FIELDS)), tokens.to_batches(max_chunksize=BATCH))
    with written(texts) as part_file:
        write_lines(part_file, table.column("record"), order)
        # Not beside the records: it is of their index, and not of the dataset. Before them: where they are, all is done.
        hashes = [table.column(column).take(order).to_numpy() for column in HASHES]
        with written(plan.work / KNOWN_BY / split / f"{name}.npy") as known, known.open("wb") as file:
            np.save(file, np.column_stack(hashes))
    return len(table)


def write_lines(path: Path, records: pa.ChunkedArray, order: pa.Array) -> None:
    """One record a line."""
    together = records.combine_chunks()
    with path.open("wb") as file:
        for begin in range(0, len(order), LINES):
            chosen = together.take(order[begin : begin + LINES]).to_pylist()
            file.write(b"\n".join([*chosen, b""]))
