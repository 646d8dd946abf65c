"""Prefetch the rows of the next step from disk."""

import ctypes
import mmap
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

from transformers import TrainerCallback

from recipes.training.data.packing import PackedRows
from recipes.training.data.sample_order import RunSamples
from recipes.training.parallel.process_group import ProcessGroup


class RowPrefetcher(TrainerCallback):  # type: ignore[misc]
    """Ask the kernel to read ahead the rows of this process's next step.

    Processes take the micro-batches of a step in turn.

    Args:
        batch: rows of a micro-batch.
    """

    def __init__(self, rows: PackedRows, samples: RunSamples, batch: int, group: ProcessGroup) -> None:
        self._rows = rows
        self._samples = samples
        self._batch = batch
        self._group = group
        self._upcoming: Iterator[int] = iter(())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._upcoming = islice(self._samples, self._samples.count_seen(state.global_step), None)
        self._advise_step()
        self._advise_step()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer has read this step's rows by now, and the first of the next."""
        self._advise_step()

    def _advise_step(self) -> None:
        step = list(islice(self._upcoming, self._samples.per_step))
        for row in select_process_rows(step, self._batch, self._group):
            for address, size in self._rows.memory_ranges(row):
                advise_will_need(address, size)


def select_process_rows(step: list[int], batch: int, group: ProcessGroup) -> list[int]:
    """Return the rows of a step that this process computes."""
    return [row for place, row in enumerate(step) if place // batch % group.data_size == group.data_rank]


def advise_will_need(address: int, size: int) -> None:
    """Hint that a memory range will be read.

    No effect on anonymous memory or where unsupported.
    """
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    load_libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + size - first), mmap.MADV_WILLNEED)


@cache
def load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
