"""Rows of a step are prefetched into the page cache during the previous step."""

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from recipes import train as program
from recipes.preparation.plan import open_table, write_table
from recipes.runner import Preempted
from recipes.training.data.packing import PackedRows
from recipes.training.data.prefetch import advise_will_need, select_process_rows
from recipes.training.data.rows import TOKEN_SCHEMA
from recipes.training.data.sample_order import ProcessSampler, RunSamples, SampleOrder
from tests.recipes.training.training_workspace import Place, facts, stop_after

STEPS = 8


@pytest.mark.requirement("B18")
def test_step_reads_the_rows_prefetched_in_the_previous_step(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a new run and for a resumed one."""
    happened: list[tuple[str, PackedRows, int]] = []

    def noted(name: str) -> None:
        does = getattr(PackedRows, name)

        def noting(self: PackedRows, row: int) -> Any:
            happened.append((name, self, row))
            return does(self, row)

        monkeypatch.setattr(PackedRows, name, noting)

    noted("memory_ranges")
    noted("__getitem__")

    def check(steps: int) -> None:
        rows = next(self for name, self, _ in happened if name == "memory_ranges")
        prefetched: list[int] = []
        asked: list[int] = []
        for name, self, row in happened:
            if self is rows:
                (prefetched if name == "memory_ranges" else asked).append(row)
                assert set(asked) <= set(prefetched)
        assert len(asked) >= steps * place.recipe.samples_per_step
        happened.clear()

    with monkeypatch.context() as patched, pytest.raises(Preempted):
        patched.setattr(program.StopOnSignal, "on_step_end", stop_after(4))
        place.train(tmp_path, max_steps=STEPS)
    check(4)
    assert facts(place.train(tmp_path, max_steps=STEPS)).resumed_from == 4
    check(STEPS - 4)


@pytest.mark.parametrize("together", [1, 2])
def test_each_process_prefetches_the_rows_assigned_to_it(together: int) -> None:
    samples, batch, size = RunSamples(SampleOrder(40, seed=1), per_step=12, steps=5), 2, 3
    places = ProcessSampler(samples, places=12, batch=batch, processes=together)
    for rank in range(size * together):
        dealt = BatchSamplerShard(BatchSampler(places, batch, drop_last=True), size * together, rank)
        group: Any = SimpleNamespace(data_rank=rank // together, data_size=size)
        rows = list(samples)
        selected = [select_process_rows(rows[first : first + 12], batch, group) for first in range(0, len(rows), 12)]
        assert [row for step in selected for row in step] == [row for some in dealt for row in some]


@pytest.fixture
def file_on_a_disk() -> Iterator[Path]:
    """Yield a file on a disk: many systems keep /tmp in memory."""
    with TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder) / "tokens.arrow"


def test_prefetch_reads_only_the_announced_rows_into_page_cache(file_on_a_disk: Path) -> None:
    file = file_on_a_disk
    size, records = 100_000, 200
    tokens = np.arange(size, dtype=np.int32)
    batch = pa.record_batch(
        {
            "input_ids": pa.array([tokens] * records, type=TOKEN_SCHEMA.field("input_ids").type),
            "assistant_mask": pa.array([np.ones(size, dtype=bool)] * records),
            "length": pa.array([size] * records, type=TOKEN_SCHEMA.field("length").type),
        },
        schema=TOKEN_SCHEMA,
    )
    write_table(file, TOKEN_SCHEMA, [batch])
    rows = PackedRows(open_table(file), size, padding=0)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (ids,), (far,) = rows.memory_ranges(150), rows.memory_ranges(20)
    assert ids[1] == 4 * size and not is_read(*ids), "a file system that keeps its files in memory tests nothing"
    advise_will_need(*ids)
    end = time.monotonic() + 30
    while not is_read(*ids):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not is_read(*far)
    assert np.array_equal(rows[150]["input_ids"].numpy(), tokens)


def is_read(address: int, size: int) -> bool:
    """Return whether all pages of the range are in memory."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    pages = (ctypes.c_ubyte * (-(-(address + size - first) // mmap.PAGESIZE)))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(address + size - first), pages) == 0
    return all(page & 1 for page in pages)
