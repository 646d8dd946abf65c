"""Equal records: of each, the first in the order of the input stays."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recipes.preparation.tables import open_table

AT_ONCE = 8_000_000
"""Digests that are sorted at a time, which takes 64 bytes for each; more are sorted in shares, by their last byte."""


def duplicates(files: Sequence[Path], at_once: int = AT_ONCE) -> list[NDArray[np.bool_]]:
    """Of each range's table with the column `digest`, in order: which records were there before.

    Holds 17 bytes a record in memory, and a share of them while it is sorted.
    """
    if not files:
        return []
    digests = [halves(open_table(file).column("digest")) for file in files]
    starts = np.cumsum([0, *(len(part) for part in digests)])
    found = np.zeros(int(starts[-1]), dtype=bool)
    shares = int(starts[-1] // at_once + 1)
    for share in range(shares):
        chosen = [np.flatnonzero((part[:, 0] & np.uint64(0xFF)) % np.uint64(shares) == share) for part in digests]
        keys = np.concatenate([part[rows] for part, rows in zip(digests, chosen, strict=True)])
        places = np.concatenate([rows + start for rows, start in zip(chosen, starts, strict=False)])
        order = np.lexsort((places, keys[:, 1], keys[:, 0]))
        again = (keys[order[1:]] == keys[order[:-1]]).all(axis=1)
        found[places[order[1:][again]]] = True
    return [found[begin:end] for begin, end in pairwise(starts)]


def halves(column: pa.ChunkedArray) -> NDArray[np.uint64]:
    """16-byte values as numbers of shape [records, 2]."""
    parts = [
        np.frombuffer(chunk.buffers()[1], dtype="<u8").reshape(-1, 2)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
    ]
    return np.concatenate([*parts, np.zeros((0, 2), dtype="<u8")])
