"""Which records describe a dataset: each is drawn by a hash of its line, so the same version gives the same sample."""

import numpy as np
from numpy.typing import NDArray


def drawn(start: int, count: int, share: float) -> NDArray[np.bool_]:
    """Of the lines `start`, `start + 1`, ..., which are in the sample of a `share` from 0 to 1 of all (splitmix64)."""
    if share >= 1:
        return np.ones(count, dtype=bool)
    value = np.arange(start, start + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    chosen: NDArray[np.bool_] = (value ^ (value >> np.uint64(31))) < np.uint64(share * 2**64)
    return chosen
