"""Nearly equal records: MinHash signatures, compared where they agree in a whole band (locality-sensitive hashing).

Of records in one bucket of a band all but the first are held against it, so that the work stays linear; a record is one too
many when its estimated similarity to that one is at least the threshold.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash

from recipes.contracts.parameters import NearDuplicates
from recipes.records.disk_partitions import Partitions, Places, Rows, Scratch, rows_of
from recipes.records.record_reader import normalize

RUN = 3
"""Words of one shingle."""

CHUNK = 1 << 14
"""Signatures that are compared at a time."""
BANDED = np.dtype([("key", "<u8"), ("band", "<u2"), ("place", "<u8")])
PAIR = np.dtype([("head", "<u8"), ("later", "<u8")])


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
    files: Sequence[Path], kept: Iterable[NDArray[np.bool_]], total: int, parameters: NearDuplicates, scratch: Scratch
) -> Iterator[Places]:
    """Which of `total` records are nearly equal to an earlier one, some at a time, and some of them more than once.

    Args:
        files: the signatures of each range's records, in the order of the input.
        kept: of each range, which records are looked at: of equal ones, the first.
    """
    bands, width = bands_of(parameters)
    starts = [0]
    rows = total * bands
    with scratch.partitions("banded", BANDED, rows) as banded, scratch.partitions("pairs", PAIR, rows) as pairs:
        for file, marks in zip(files, kept, strict=True):
            signatures = np.load(file)[marks]
            places = starts[-1] + np.flatnonzero(marks)
            for band in range(bands):
                keys = band_keys(signatures, band * width, width)
                banded.add(banded.of_hashes(keys), rows_of(BANDED, keys, np.full(len(keys), band), places))
            starts.append(starts[-1] + len(marks))
        for number in range(banded.count):
            for found in pairs_in(banded.pieces(number)):
                # By the later one: it has few, where very many may have one head.
                pairs.add(found["later"] * pairs.count // max(total, 1), found)
        with scratch.partitions("heads", PAIR, total) as heads:
            count = 0
            for number in range(pairs.count):
                for found in map(each_once, pairs.pieces(number)):
                    heads.add(found["head"] * heads.count // max(total, 1), found)
                    count += len(found)
            yield from near(files, np.array(starts), heads, count, parameters, scratch)


def each_once(pairs: Rows) -> Rows:
    """Pairs without those that are there again, from another band."""
    pairs = pairs[np.lexsort((pairs["head"], pairs["later"]))]
    is_first = np.ones(len(pairs), np.bool_)
    is_first[1:] = (pairs["head"][1:] != pairs["head"][:-1]) | (pairs["later"][1:] != pairs["later"][:-1])
    return pairs[is_first]


def pairs_in(pieces: Iterable[Rows]) -> Iterator[Rows]:
    """Of the records in one bucket of a band each with the first of them."""
    firsts = np.zeros(0, BANDED)
    for rows in pieces:
        rows = np.concatenate([firsts, rows]) if len(firsts) else rows
        rows = rows[np.lexsort((rows["place"], rows["band"], rows["key"]))]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = (rows["key"][1:] != rows["key"][:-1]) | (rows["band"][1:] != rows["band"][:-1])
        firsts = rows[is_first]
        heads = np.repeat(firsts["place"], np.diff(np.flatnonzero(is_first), append=len(rows)))
        yield rows_of(PAIR, heads[~is_first], rows["place"][~is_first])


def near(
    files: Sequence[Path],
    starts: NDArray[np.int64],
    heads: Partitions,
    count: int,
    parameters: NearDuplicates,
    scratch: Scratch,
) -> Iterator[Places]:
    """The later ones of `count` pairs that are nearly equal. No signature is read but beside others of its file: the head's
    is taken to where the later one's lies."""
    signed = np.dtype([("later", "<u8"), ("signature", "<u4", (parameters.permutations,))])
    total = int(starts[-1])
    with scratch.partitions("signed", signed, count) as with_head:
        for number in range(heads.count):
            for rows in heads.pieces(number):
                rows = rows[np.argsort(rows["head"], kind="stable")]
                for chosen, signatures in signatures_of(files, starts, rows["head"]):
                    later = rows["later"][chosen]
                    with_head.add(later * with_head.count // max(total, 1), rows_of(signed, later, signatures))
        for number in range(with_head.count):
            for rows in with_head.pieces(number):
                rows = rows[np.argsort(rows["later"], kind="stable")]
                for chosen, signatures in signatures_of(files, starts, rows["later"]):
                    same = (rows["signature"][chosen] == signatures).mean(axis=1)
                    yield rows["later"][chosen][same >= parameters.threshold]


def signatures_of(
    files: Sequence[Path], starts: NDArray[np.int64], places: Places
) -> Iterator[tuple[slice, NDArray[np.uint32]]]:
    """The signatures of records that are in order, file by file: which of the records, and theirs."""
    borders = np.searchsorted(places, starts)
    for number in np.flatnonzero(np.diff(borders)).tolist():
        signatures = np.load(files[number], mmap_mode="r")
        for begin in range(borders[number], borders[number + 1], CHUNK):
            chosen = slice(begin, min(begin + CHUNK, borders[number + 1]))
            yield chosen, signatures[places[chosen] - np.uint64(starts[number])]


def band_keys(signatures: NDArray[np.uint32], start: int, rows: int) -> NDArray[np.uint64]:
    """One number for the values of a band, of each record."""
    keys = np.full(len(signatures), start, dtype=np.uint64)
    for column in range(start, start + rows):
        keys = (keys ^ signatures[:, column]) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys
