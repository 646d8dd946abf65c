"""The rows of the next steps come from the disk while one is computed (row B18).

Tokens lie in files that are mapped into memory, and whoever asks for a row that memory does not hold waits for the disk. The
system is told beforehand what will be asked for; that changes when it reads, and nothing else.
"""

import ctypes
import mmap
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

from transformers import TrainerCallback

from recipes.training.data.packing import PackedRows
from recipes.training.data.sample_order import SamplesOfRun
from recipes.training.parallel.process_group import Group


class ReadAhead(TrainerCallback):  # type: ignore[misc]
    """For the rows that this process computes with: of each step's micro-batches the processes take one after the other.

    Args:
        batch: rows of a micro-batch.
    """

    def __init__(self, rows: PackedRows, samples: SamplesOfRun, batch: int, group: Group) -> None:
        self._rows = rows
        self._samples = samples
        self._batch = batch
        self._group = group
        self._following: Iterator[int] = iter(())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._following = islice(self._samples, self._samples.seen(state.global_step), None)
        self._tell()
        self._tell()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """By now the library has asked for all rows of this step, and for the first of the next one."""
        self._tell()

    def _tell(self) -> None:
        step = list(islice(self._following, self._samples.per_step))
        for row in of_process(step, self._batch, self._group):
            for address, size in self._rows.place_of(row):
                will_need(address, size)


def of_process(step: list[int], batch: int, group: Group) -> list[int]:
    """The rows of a step that one process has."""
    return [row for place, row in enumerate(step) if place // batch % group.data_size == group.data_rank]


def will_need(address: int, size: int) -> None:
    """Of memory that is no file's, and where the system does not take the hint, nothing comes of it."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    system_library().madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + size - first), mmap.MADV_WILLNEED)


@cache
def system_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
