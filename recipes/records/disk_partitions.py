"""Partition rows on disk, to process data that does not fit into memory.

The first step of an external sort or join. 10 billion records in rows of 24 bytes are 240 GB on disk, but need only some
330 MB of memory, as 16 million or 40 records do. Data that fits into memory is never written.
"""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

BUFFER_BYTES = 32 << 20
"""Size of the write buffer, and about of a partition: sorting one takes three times as much."""
MAX_OPEN_PARTITIONS = 1024
"""Maximum number of partitions filled at a time."""

Rows = NDArray[np.void]
RecordNumbers = NDArray[np.uint64]
"""Numbers of records in the order of the input, from 0."""


def build_rows(kind: np.dtype[Any], *columns: Any) -> Rows:
    """Combine columns of equal length into a structured array."""
    rows = np.empty(len(columns[0]), kind)
    for name, column in zip(kind.names or (), columns, strict=True):
        rows[name] = column
    return rows


@dataclass(frozen=True)
class Scratch:
    """Temporary storage: a folder and a memory limit."""

    folder: Path
    held_bytes: int = BUFFER_BYTES

    def partitions(self, name: str, kind: np.dtype[Any], rows: int) -> "Partitions":
        """Create partitions for `rows` rows, sized to fit into memory if rows are spread evenly."""
        return Partitions(self.folder / name, kind, rows * kind.itemsize // self.held_bytes + 1, self.held_bytes)

    def column(self, name: str, kind: DTypeLike, places: int, default: int) -> "SpilledColumn":
        return SpilledColumn(self, name, np.dtype(kind), places, default)


class Partitions:
    """Rows in `count` partitions, in order of arrival; all are added before any is read.

    Each flush of the buffer writes to every partition, so that twice the rows would need four times the writes. More than
    `MAX_OPEN_PARTITIONS` are filled in two rounds: first into the square root of their number, then each of those when it is
    read. As a context manager it deletes its files.
    """

    def __init__(self, folder: Path, kind: np.dtype[Any], count: int, held_bytes: int) -> None:
        self.count = count
        self._folder, self._kind, self._held_bytes = folder, kind, held_bytes
        self._held: list[tuple[NDArray[np.int32], Rows]] = []
        self._bytes = 0
        self._last: BufferedRows | None = None
        self._coarse: Partitions | None = None
        self._fine: tuple[int, Partitions] | None = None
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
        if count > MAX_OPEN_PARTITIONS:
            self._each = max(2, isqrt(count))
            self._numbered = np.dtype([("number", "<i4"), ("row", kind)])
            self._coarse = Partitions(folder / "coarse", self._numbered, -(-count // self._each), held_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def partition_numbers(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the partition of each hash; lower hashes are in lower partitions."""
        return ((hashes >> np.uint64(32)) * np.uint64(self.count) >> np.uint64(32)).astype(np.int64)

    def add(self, numbers: NDArray[Any], rows: Rows) -> None:
        """Add each row to the partition with its number."""
        assert self._last is None, "rows that come after the first was read would be lost"
        numbers = numbers.astype(np.int32)
        if self._coarse is not None:
            self._coarse.add(numbers // self._each, build_rows(self._numbered, numbers, rows))
            return
        self._held.append((numbers, rows))
        self._bytes += rows.nbytes
        if self._bytes >= self._held_bytes:
            self._write(self._drain_buffer())

    def pieces(self, number: int) -> Iterator[Rows]:
        """Yield the rows of a partition.

        All at once, unless it is oversized, as with a very frequent hash.
        """
        if self._coarse is not None:
            yield from self._open_fine(number // self._each).pieces(number % self._each)
            return
        path = self._place(number)
        held = self._flush_buffer()
        if not path.is_file():
            if len(rows := held.partition_rows(number)):
                yield rows
            return
        # A single partition on disk holds all rows in order, which are consumed in small batches.
        most = max(1, (2 * self._held_bytes if self.count > 1 else self._held_bytes // 4) // self._kind.itemsize)
        with path.open("rb") as file:
            for _ in range(0, path.stat().st_size, most * self._kind.itemsize):
                yield np.fromfile(file, self._kind, most)

    def _open_fine(self, coarse: int) -> "Partitions":
        assert self._coarse is not None
        if self._fine is None or self._fine[0] != coarse:
            found = Partitions(self._folder / "fine", self._kind, self._each, self._held_bytes)
            for rows in self._coarse.pieces(coarse):
                found.add(rows["number"] % self._each, np.ascontiguousarray(rows["row"]))
            self._fine = coarse, found
        return self._fine[1]

    def _place(self, number: int) -> Path:
        return self._folder / str(number)

    def _drain_buffer(self) -> "BufferedRows":
        numbers = np.concatenate([np.zeros(0, np.int32), *(numbers for numbers, _ in self._held)])
        rows = np.concatenate([np.zeros(0, self._kind), *(rows for _, rows in self._held)])
        self._held, self._bytes = [], 0
        order = np.argsort(numbers, kind="stable")
        return BufferedRows(rows, order, np.searchsorted(numbers[order], np.arange(self.count + 1)))

    def _write(self, held: "BufferedRows") -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in np.flatnonzero(np.diff(held.starts)).tolist():
            with self._place(number).open("ab") as file:
                held.partition_rows(number).tofile(file)

    def _flush_buffer(self) -> "BufferedRows":
        """Return the rows that are not on disk: all or none."""
        if self._last is None:
            self._last = self._drain_buffer()
            if self._folder.is_dir():
                self._write(self._last)
                self._last = self._drain_buffer()
        return self._last


@dataclass(frozen=True)
class BufferedRows:
    """Rows in memory, and their order by partition; `starts` holds the beginning of each partition."""

    rows: Rows
    order: NDArray[np.int64]
    starts: NDArray[np.int64]

    def partition_rows(self, number: int) -> Rows:
        return self.rows[self.order[self.starts[number] : self.starts[number + 1]]]


class SpilledColumn:
    """A column of values by position, assigned in any order and read sequentially.

    Unset values are `default`.
    """

    def __init__(self, scratch: Scratch, name: str, kind: np.dtype[Any], places: int, default: int) -> None:
        self._row = np.dtype([("place", "<u8"), ("value", kind)])
        self._kind, self._places, self._default = kind, places, default
        self._at_once = max(1, scratch.held_bytes // self._row.itemsize)
        self._rows = Partitions(scratch.folder / name, self._row, places // self._at_once + 1, scratch.held_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._rows.__exit__(*exception)

    def assign(self, places: RecordNumbers, values: Any) -> None:
        """Assign one value to all positions, or one value each."""
        values = np.broadcast_to(np.asarray(values, self._kind), places.shape)
        self._rows.add(places // np.uint64(self._at_once), build_rows(self._row, places, values))

    def runs(self, lengths: Iterable[int]) -> Iterator[NDArray[Any]]:
        """Yield the values from the first position on in runs of these lengths."""
        return map(self.reader().take, lengths)

    def reader(self) -> "ColumnReader":
        return ColumnReader(self._blocks())

    def _blocks(self) -> Iterator[NDArray[Any]]:
        for number in range(self._rows.count):
            first = number * self._at_once
            block = np.full(min(self._at_once, self._places - first), self._default, self._kind)
            for rows in self._rows.pieces(number):
                block[rows["place"] - np.uint64(first)] = rows["value"]
            yield block


class ColumnReader:
    """Reads values from blocks in runs of any length."""

    def __init__(self, blocks: Iterator[NDArray[Any]]) -> None:
        self._blocks = blocks
        self._block = next(blocks)

    def take(self, length: int) -> NDArray[Any]:
        blocks = [self._block[:length]]
        while (length := length - len(blocks[-1])) > 0:
            block = next(self._blocks, None)
            if block is None:
                raise IndexError("more values are requested than there are positions")
            self._block = block
            blocks.append(self._block[:length])
        self._block = self._block[len(blocks[-1]) :]
        return np.concatenate(blocks)
