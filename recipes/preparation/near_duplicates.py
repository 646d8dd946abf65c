"""Nearly equal records: MinHash signatures, compared where they agree in a whole band (locality-sensitive hashing).

Of records in one bucket of a band all but the first are held against it, so that the work stays linear; a record is one too
many when its estimated similarity to that one is at least the threshold.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash

from recipes.parameters import NearDuplicates
from recipes.records import normalize

RUN = 3
"""Words of one shingle."""

CHUNK = 1 << 16


def shingles(text: str) -> list[str]:
    """All runs of three words, regardless of capitals and punctuation; a shorter text is one run."""
    words = normalize(text).split()
    return [" ".join(words[start : start + RUN]) for start in range(max(1, len(words) - RUN + 1))]


class Signer:
    """Collects the signatures of texts."""

    def __init__(self, parameters: NearDuplicates) -> None:
        self._parameters = parameters
        self._digests: list[list[int]] = []

    def add(self, text: str) -> None:
        signature = RMinHash(self._parameters.permutations, self._parameters.seed)
        signature.update(shingles(text))
        self._digests.append(signature.digest())

    def signatures(self) -> NDArray[np.uint32]:
        """Shape [texts, permutations]."""
        return np.array(self._digests, dtype=np.uint32).reshape(-1, self._parameters.permutations)


def bands_of(parameters: NearDuplicates) -> tuple[int, int]:
    """(bands, rows of each): the most selective bands that still find nearly all pairs at the threshold.

    A pair of similarity s agrees in some band with the probability 1 - (1 - s^rows)^bands.
    """
    fitting = [
        (parameters.permutations // rows, rows)
        for rows in range(1, parameters.permutations + 1)
        if 1 - (1 - parameters.threshold**rows) ** (parameters.permutations // rows) >= 0.95
    ]
    return max(fitting, key=lambda shape: shape[1]) if fitting else (parameters.permutations, 1)


def near_duplicates(
    files: Sequence[Path], kept: Sequence[NDArray[np.bool_]], parameters: NearDuplicates
) -> list[NDArray[np.bool_]]:
    """Which records are nearly equal to an earlier one; of those in `kept` alone, in the order of the ranges.

    Holds 16 bytes a record in memory, one band after the other; the signatures stay in their files.
    """
    if not files:
        return []
    parts = [np.load(file, mmap_mode="r") for file in files]
    bands, rows = bands_of(parameters)
    starts = np.cumsum([0, *(len(part) for part in parts)])
    alive = np.concatenate([*kept, np.zeros(0, dtype=bool)])
    doubled = np.zeros(len(alive), dtype=bool)
    for band in range(bands):
        keys = np.concatenate([band_keys(part, band * rows, rows) for part in parts])
        members = np.flatnonzero(alive)
        order = members[np.argsort(keys[members], kind="stable")]
        is_first = np.ones(len(order), dtype=bool)
        is_first[1:] = keys[order[1:]] != keys[order[:-1]]
        heads = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
        later, heads = order[~is_first], heads[~is_first]
        for start in range(0, len(later), CHUNK):
            pair = slice(start, start + CHUNK)
            same = (gather(parts, starts, later[pair]) == gather(parts, starts, heads[pair])).mean(axis=1)
            doubled[later[pair][same >= parameters.threshold]] = True
    return [doubled[begin:end] for begin, end in pairwise(starts)]


def band_keys(signatures: NDArray[np.uint32], start: int, rows: int) -> NDArray[np.uint64]:
    """One number for the values of a band, of each record."""
    keys = np.full(len(signatures), start, dtype=np.uint64)
    for column in range(start, start + rows):
        keys = (keys ^ signatures[:, column]) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys


def gather(parts: Sequence[NDArray[np.uint32]], starts: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Signatures by their number over all ranges."""
    owner = np.searchsorted(starts, wanted, side="right") - 1
    found = np.empty((len(wanted), parts[0].shape[1]), dtype=np.uint32)
    for part in np.unique(owner):
        mine = owner == part
        found[mine] = parts[part][wanted[mine] - starts[part]]
    return found
