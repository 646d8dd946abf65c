"""Numbers that look random and are the same everywhere: the order of a shuffle."""

import numpy as np
from numpy.typing import NDArray


def mixed(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Other numbers for other seeds, each a permutation of all 64-bit numbers (the finalizer of splitmix64)."""
    salt = np.uint64((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF)
    mixed = (values ^ salt) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
