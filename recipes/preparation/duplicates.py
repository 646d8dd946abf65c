"""Equal records: of each, the first in the order of the input stays."""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recipes.records.disk_partitions import Places, Scratch, rows_of

DIGESTED = np.dtype([("first", "<u8"), ("second", "<u8"), ("place", "<u8")])

Digests = NDArray[np.uint64]
"""16 bytes of each record as two numbers, shape [records, 2]."""


def duplicates(digests: Iterable[Digests], total: int, scratch: Scratch) -> Iterator[Places]:
    """Which of `total` records were there before, some at a time; the digests come in the order of the input."""
    with scratch.partitions("digests", DIGESTED, total) as partitions:
        before = 0
        for part in digests:
            places = before + np.arange(len(part))
            partitions.add(partitions.of_hashes(part[:, 0]), rows_of(DIGESTED, part[:, 0], part[:, 1], places))
            before += len(part)
        for number in range(partitions.count):
            firsts = np.zeros(0, DIGESTED)
            for rows in partitions.pieces(number):
                rows = np.concatenate([firsts, rows]) if len(firsts) else rows
                rows = rows[np.lexsort((rows["place"], rows["second"], rows["first"]))]
                again = (rows["first"][1:] == rows["first"][:-1]) & (rows["second"][1:] == rows["second"][:-1])
                again = np.concatenate([np.zeros(min(len(rows), 1), np.bool_), again])
                yield rows["place"][again]
                firsts = rows[~again]


def halves(column: pa.ChunkedArray) -> Digests:
    """16-byte values as numbers of shape [records, 2]."""
    parts = [
        np.frombuffer(chunk.buffers()[1], dtype="<u8").reshape(-1, 2)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
    ]
    return np.concatenate([*parts, np.zeros((0, 2), dtype="<u8")])
