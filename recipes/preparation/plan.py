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

# What a preparation consists of: ranges of the input, each a unit of work, and where each unit leaves its files.

RANGE_BYTES = 16 << 20
"""Of input for one unit: small enough that a worker's memory stays low, large enough that its start does not count."""

PART_BYTES = 32 << 20
"""Of prepared data, about, in one output file."""


@dataclass(frozen=True)
class Range:
    """The lines of a file that begin at bytes `start` to before `end`; all of its bytes are in one range of it."""

    file: str
    start: int
    end: int


@dataclass(frozen=True)
class Plan:
    """All that a unit of work is told; the same for all of them."""

    work: Path
    ranges: tuple[Range, ...]
    parameters: PrepareParameters
    part_bytes: int = PART_BYTES
    fan: int = MERGE_FAN_IN
    held_bytes: int = BUFFER_BYTES

    def place(self, stage: str, index: int, suffix: str) -> Path:
        """Where a unit of a stage leaves a file."""
        return self.work / stage / f"{index:05}.{suffix}"

    @property
    def scratch(self) -> Scratch:
        """Where what is asked of all records together lies while it is found out."""
        return Scratch(self.work / "scratch", self.held_bytes)


def cut_ranges(files: Iterable[FileRecord], range_bytes: int = RANGE_BYTES) -> tuple[Range, ...]:
    """Ranges of `range_bytes`: nothing of a file needs to be here to know them."""
    return tuple(
        Range(file.path, start, min(start + range_bytes, file.size))
        for file in files
        for start in range(0, file.size, range_bytes)
    )


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path to write to, which gets the name `path` once it is whole: a unit that was killed has no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    yield part
    part.replace(path)


# Files between the stages: written once, then read. Tables are read in place, without a copy of them in memory.


def write_table(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write batches as an Arrow IPC file; it appears whole or not at all."""
    with atomic_path(path) as part, pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def open_table(path: Path) -> pa.Table:
    """The table of an Arrow IPC file, which stays on the disk."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write an array; it appears whole or not at all."""
    with atomic_path(path) as part, part.open("wb") as file:
        np.save(file, array)


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow IPC file, which stays on the disk; nothing is held of those before.

    `open_table` holds two kilobytes of each batch, wherever its bytes are.
    """
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


class Reject(msgspec.Struct, array_like=True):
    """A line of a range, from 1, and why it was rejected: `reason` is one of a few, `detail` is about this record."""

    line: int
    reason: str
    detail: str = ""


def write_rejected_records(path: Path, plan: Plan, ranges: Iterable[tuple[int, list[Reject]]]) -> Counter[str]:
    """Write all rejects in the order of the input; returns how many for each reason.

    Args:
        ranges: of each range of the plan, in order, how many lines it has and what was rejected of it. A record's text is
            not written: it may be what should not be kept.
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
