"""Plan a preparation, and write the files between its stages and the rejected records."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recipes.contracts.parameters import PrepareParameters
from recipes.preparation.shuffle_plan import MERGE_FAN_IN
from recipes.records.disk_partitions import BUFFER_BYTES, Scratch
from recipes.storage.manifest import FileRecord

# The units of a preparation: ranges of the input, and the files of each unit.

RANGE_BYTES = 16 << 20
"""Input bytes per unit: small enough for low memory per worker, large enough to amortize its start."""

PART_BYTES = 32 << 20
"""Approximate bytes of prepared data per output file."""


@dataclass(frozen=True)
class Range:
    """The lines that begin at bytes `start` to `end` (exclusive) of a file."""

    file: str
    start: int
    end: int


@dataclass(frozen=True)
class Plan:
    """Everything that a unit of work needs to know; equal for all units."""

    work: Path
    ranges: tuple[Range, ...]
    parameters: PrepareParameters
    part_bytes: int = PART_BYTES
    fan: int = MERGE_FAN_IN
    held_bytes: int = BUFFER_BYTES

    def place(self, stage: str, index: int, suffix: str) -> Path:
        """Return the path of a file of a unit in a stage."""
        return self.work / stage / f"{index:05}.{suffix}"

    @property
    def scratch(self) -> Scratch:
        """Temporary storage for computations over all records."""
        return Scratch(self.work / "scratch", self.held_bytes)


def cut_ranges(files: Iterable[FileRecord], range_bytes: int = RANGE_BYTES) -> tuple[Range, ...]:
    """Divide files into ranges of `range_bytes`; needs their records only."""
    return tuple(
        Range(file.path, start, min(start + range_bytes, file.size))
        for file in files
        for start in range(0, file.size, range_bytes)
    )


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` when the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    yield part
    part.replace(path)


# Files between stages are written once. Tables are memory-mapped, not copied.


def write_table(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write batches as an Arrow IPC file, atomically."""
    with atomic_path(path) as part, pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def open_table(path: Path) -> pa.Table:
    """Memory-map an Arrow IPC file as a table."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write an array atomically."""
    with atomic_path(path) as part, part.open("wb") as file:
        np.save(file, array)


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a memory-mapped Arrow IPC file, one at a time.

    `open_table` holds two kilobytes of metadata per batch.
    """
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


class Reject(msgspec.Struct, array_like=True):
    """A rejected line of a range, counted from 1.

    `reason` is one of a few categories, `detail` describes this record.
    """

    line: int
    reason: str
    detail: str = ""


def write_rejected_records(path: Path, plan: Plan, ranges: Iterable[tuple[int, list[Reject]]]) -> Counter[str]:
    """Write all rejects in the order of the input, and return their number by reason.

    Records' texts are not written: they may be the reason for the rejection.

    Args:
        ranges: number of lines and rejects of each range, in the plan's order.
    """
    counts: Counter[str] = Counter()

    def lines() -> Iterator[str]:
        before, file = 0, None
        for place, (length, rejects) in zip(plan.ranges, ranges, strict=True):
            before = before if place.file == file else 0
            file = place.file
            for reject in sorted(rejects, key=lambda reject: reject.line):
                counts[reject.reason] += 1
                row = {"file": file, "line": before + reject.line, "reason": reject.reason, "detail": reject.detail}
                yield json.dumps(row, ensure_ascii=False) + "\n"
            before += length

    with atomic_path(path) as part, part.open("w", encoding="utf-8") as out:
        out.writelines(lines())
    return counts
