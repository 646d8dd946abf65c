"""Files between the stages: written once, then read. Tables are read in place, without a copy of them in memory."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recipes.preparation.plan import written


def write_table(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write batches as an Arrow IPC file; it appears whole or not at all."""
    with written(path) as part, pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def open_table(path: Path) -> pa.Table:
    """The table of an Arrow IPC file, which stays on the disk."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write an array; it appears whole or not at all."""
    with written(path) as part, part.open("wb") as file:
        np.save(file, array)


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow IPC file, which stays on the disk; nothing is held of those before.

    `open_table` holds two kilobytes of each batch, wherever its bytes are.
    """
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)
