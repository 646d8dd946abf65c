"""Measure how long training waits for uncached rows, with and without prefetching.

    python -m benchmarks.row_prefetch [--megabytes 512] [--rounds 3]

Each step reads rows of 2,048 tokens at random positions of a file, which is evicted from the page cache before each
measurement. Computation is replaced by a pause; only the time to read the rows is measured.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from recipes.preparation.plan import open_table, write_table
from recipes.training.data.packing import PackedRows
from recipes.training.data.prefetch import advise_will_need
from recipes.training.data.rows import TOKEN_SCHEMA

LENGTH = 2048
ROWS, STEPS = 8, 12
STEP_SECONDS = 0.2
"""Simulated computing time of a step."""


def write_records(path: Path, megabytes: int) -> None:
    """Write records of long-tailed lengths, about 20 per row, in batches like a preparation's."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(4.2, 0.9, 10_000).astype(np.int32) + 2, LENGTH)
    offsets = pa.array(np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)]))
    tokens = pa.array(np.arange(lengths.sum(), dtype=np.int32) % 50_000)
    taught = pa.array(np.ones(len(tokens), dtype=np.bool_))
    columns = {
        "input_ids": pa.ListArray.from_arrays(offsets, tokens),
        "assistant_mask": pa.ListArray.from_arrays(offsets, taught),
        "length": pa.array(lengths),
    }
    batch = pa.record_batch([columns[field.name].cast(field.type) for field in TOKEN_SCHEMA], TOKEN_SCHEMA)
    write_table(path, TOKEN_SCHEMA, [batch] * max(1, (megabytes << 20) // batch.nbytes))


def evict_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_wait(path: Path, prefetches: bool, seed: int) -> float:
    """Return the seconds spent reading rows; as in training, prefetches are two steps ahead."""
    evict_page_cache(path)  # evict before opening the file: mapped pages cannot be evicted
    rows = PackedRows(open_table(path), LENGTH, padding=0)
    chosen = np.random.default_rng(seed).integers(0, len(rows), (STEPS, ROWS)).tolist()
    seconds = 0.0

    def advise(step: int) -> None:
        for row in chosen[step] if prefetches and step < STEPS else ():
            for address, size in rows.memory_ranges(row):
                advise_will_need(address, size)

    advise(0)
    advise(1)
    for step in range(STEPS):
        advise(step + 2)
        time.sleep(STEP_SECONDS)  # before the rows, so that the first step's rows are prefetched a step ahead as well
        began = time.perf_counter()
        for row in chosen[step]:
            rows[row]
        seconds += time.perf_counter() - began
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="folder on the disk to measure")
    given = parser.parse_args()
    with TemporaryDirectory(dir=given.folder) as folder:
        file = Path(folder) / "tokens.arrow"
        write_records(file, given.megabytes)
        found: dict[bool, list[float]] = {True: [], False: []}
        for number in range(given.rounds):
            for prefetches in found:
                found[prefetches].append(1000 * measure_wait(file, prefetches, seed=number) / (STEPS * ROWS))
                print(
                    f"round {number + 1}: {'prefetched' if prefetches else 'not prefetched'} "
                    f"{found[prefetches][-1]:.2f} ms per row",
                    flush=True,
                )
    with_prefetch, without_prefetch = (statistics.median(found[prefetches]) for prefetches in (True, False))
    print(
        f"median: prefetched {with_prefetch:.2f} ms per row, not prefetched {without_prefetch:.2f}: "
        f"{without_prefetch / with_prefetch:.1f}x"
    )


if __name__ == "__main__":
    main()
