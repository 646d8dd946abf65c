"""Find equal records by digest and near duplicates by MinHash LSH."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rensa import RMinHash

from recipes.contracts.parameters import NearDuplicates
from recipes.records.disk_partitions import Partitions, RecordNumbers, Rows, Scratch, build_rows
from recipes.records.record_reader import normalize_text

# Exact duplicates: the first record in the order of the input is kept.

DIGEST_ROW = np.dtype([("first", "<u8"), ("second", "<u8"), ("place", "<u8")])

Digests = NDArray[np.uint64]
"""A digest of 16 bytes per record as two numbers: shape [records, 2]."""


def find_exact_duplicates(digests: Iterable[Digests], total: int, scratch: Scratch) -> Iterator[RecordNumbers]:
    """Yield the numbers of records that equal an earlier one, in batches.

    Digests arrive in the order of the input.
    """
    with scratch.partitions("digests", DIGEST_ROW, total) as partitions:
        before = 0
        for part in digests:
            places = before + np.arange(len(part))
            partitions.add(partitions.partition_numbers(part[:, 0]), build_rows(DIGEST_ROW, part[:, 0], part[:, 1], places))
            before += len(part)
        for number in range(partitions.count):
            firsts = np.zeros(0, DIGEST_ROW)
            for rows in partitions.pieces(number):
                rows = np.concatenate([firsts, rows]) if len(firsts) else rows
                rows = rows[np.lexsort((rows["place"], rows["second"], rows["first"]))]
                is_duplicate = (rows["first"][1:] == rows["first"][:-1]) & (rows["second"][1:] == rows["second"][:-1])
                is_duplicate = np.concatenate([np.zeros(min(len(rows), 1), np.bool_), is_duplicate])
                yield rows["place"][is_duplicate]
                firsts = rows[~is_duplicate]


def digest_words(column: pa.ChunkedArray) -> Digests:
    """Return 16-byte values as numbers of shape [records, 2]."""
    parts = [
        np.frombuffer(chunk.buffers()[1], dtype="<u8").reshape(-1, 2)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
    ]
    return np.concatenate([*parts, np.zeros((0, 2), dtype="<u8")])


# Near duplicates: MinHash signatures, compared if they agree in a whole band (locality-sensitive hashing).
#
# Records in one bucket of a band are compared with the first only, so that the work stays linear; a record is a duplicate if
# its estimated similarity to that one reaches the threshold.

SHINGLE_WORDS = 3
"""Number of words in a shingle."""

SIGNATURES_PER_CHUNK = 1 << 14
"""Number of signatures compared at a time."""
BAND_ROW = np.dtype([("key", "<u8"), ("band", "<u2"), ("place", "<u8")])
PAIR_ROW = np.dtype([("head", "<u8"), ("later", "<u8")])


def make_shingles(text: str) -> list[str]:
    """Return all word trigrams, ignoring case and punctuation; a shorter text is a single shingle."""
    words = normalize_text(text).split()
    return [" ".join(words[start : start + SHINGLE_WORDS]) for start in range(max(1, len(words) - SHINGLE_WORDS + 1))]


class MinHashSigner:
    """Computes the signatures of texts."""

    def __init__(self, parameters: NearDuplicates) -> None:
        self._parameters = parameters
        self._digests: list[list[int]] = []

    def add(self, text: str) -> None:
        signature = RMinHash(self._parameters.permutations, self._parameters.seed)
        signature.update(make_shingles(text))
        self._digests.append(signature.digest())

    def signatures(self) -> NDArray[np.uint32]:
        """Return the signatures, of shape [texts, permutations]."""
        return np.array(self._digests, dtype=np.uint32).reshape(-1, self._parameters.permutations)


def choose_bands(parameters: NearDuplicates) -> tuple[int, int]:
    """Return the number of bands and their rows.

    The most selective ones that find nearly all pairs at the threshold. A pair of similarity s agrees in some band with
    probability 1 - (1 - s^rows)^bands.
    """
    fitting = [
        (parameters.permutations // rows, rows)
        for rows in range(1, parameters.permutations + 1)
        if 1 - (1 - parameters.threshold**rows) ** (parameters.permutations // rows) >= 0.95
    ]
    return max(fitting, key=lambda shape: shape[1]) if fitting else (parameters.permutations, 1)


def find_near_duplicates(
    files: Sequence[Path], kept: Iterable[NDArray[np.bool_]], total: int, parameters: NearDuplicates, scratch: Scratch
) -> Iterator[RecordNumbers]:
    """Yield the numbers of records that nearly equal an earlier one; some repeatedly.

    Args:
        files: the signatures of each range's records, in the order of the input.
        kept: for each range, which records to compare; of equal records the first.
        total: number of records in all ranges.
    """
    bands, width = choose_bands(parameters)
    starts = [0]
    rows = total * bands
    with scratch.partitions("banded", BAND_ROW, rows) as banded, scratch.partitions("pairs", PAIR_ROW, rows) as pairs:
        for file, marks in zip(files, kept, strict=True):
            signatures = np.load(file)[marks]
            places = starts[-1] + np.flatnonzero(marks)
            for band in range(bands):
                keys = hash_band(signatures, band * width, width)
                banded.add(banded.partition_numbers(keys), build_rows(BAND_ROW, keys, np.full(len(keys), band), places))
            starts.append(starts[-1] + len(marks))
        for number in range(banded.count):
            for found in find_candidate_pairs(banded.pieces(number)):
                # by the later record: it is in few pairs, while a head may be in very many
                pairs.add(found["later"] * pairs.count // max(total, 1), found)
        with scratch.partitions("heads", PAIR_ROW, total) as heads:
            count = 0
            for number in range(pairs.count):
                for found in map(unique_pairs, pairs.pieces(number)):
                    heads.add(found["head"] * heads.count // max(total, 1), found)
                    count += len(found)
            yield from confirm_pairs(files, np.array(starts), heads, count, parameters, scratch)


def unique_pairs(pairs: Rows) -> Rows:
    """Remove pairs that were found in several bands."""
    pairs = pairs[np.lexsort((pairs["head"], pairs["later"]))]
    is_first = np.ones(len(pairs), np.bool_)
    is_first[1:] = (pairs["head"][1:] != pairs["head"][:-1]) | (pairs["later"][1:] != pairs["later"][:-1])
    return pairs[is_first]


def find_candidate_pairs(pieces: Iterable[Rows]) -> Iterator[Rows]:
    """Pair the first record in each bucket of a band with every other one."""
    firsts = np.zeros(0, BAND_ROW)
    for rows in pieces:
        rows = np.concatenate([firsts, rows]) if len(firsts) else rows
        rows = rows[np.lexsort((rows["place"], rows["band"], rows["key"]))]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = (rows["key"][1:] != rows["key"][:-1]) | (rows["band"][1:] != rows["band"][:-1])
        firsts = rows[is_first]
        heads = np.repeat(firsts["place"], np.diff(np.flatnonzero(is_first), append=len(rows)))
        yield build_rows(PAIR_ROW, heads[~is_first], rows["place"][~is_first])


def confirm_pairs(
    files: Sequence[Path],
    starts: NDArray[np.int64],
    heads: Partitions,
    count: int,
    parameters: NearDuplicates,
    scratch: Scratch,
) -> Iterator[RecordNumbers]:
    """Yield the later records of pairs that are nearly equal.

    Signatures are read sequentially, file by file: the head's is copied to where the later record's is read.
    """
    signed = np.dtype([("later", "<u8"), ("signature", "<u4", (parameters.permutations,))])
    total = int(starts[-1])
    with scratch.partitions("signed", signed, count) as with_head:
        for number in range(heads.count):
            for rows in heads.pieces(number):
                rows = rows[np.argsort(rows["head"], kind="stable")]
                for chosen, signatures in read_signatures(files, starts, rows["head"]):
                    later = rows["later"][chosen]
                    with_head.add(later * with_head.count // max(total, 1), build_rows(signed, later, signatures))
        for number in range(with_head.count):
            for rows in with_head.pieces(number):
                rows = rows[np.argsort(rows["later"], kind="stable")]
                for chosen, signatures in read_signatures(files, starts, rows["later"]):
                    same = (rows["signature"][chosen] == signatures).mean(axis=1)
                    yield rows["later"][chosen][same >= parameters.threshold]


def read_signatures(
    files: Sequence[Path], starts: NDArray[np.int64], places: RecordNumbers
) -> Iterator[tuple[slice, NDArray[np.uint32]]]:
    """Yield the signatures of sorted record numbers by file.

    A slice of the numbers, and their signatures.
    """
    borders = np.searchsorted(places, starts)
    for number in np.flatnonzero(np.diff(borders)).tolist():
        signatures = np.load(files[number], mmap_mode="r")
        for begin in range(borders[number], borders[number + 1], SIGNATURES_PER_CHUNK):
            chosen = slice(begin, min(begin + SIGNATURES_PER_CHUNK, borders[number + 1]))
            yield chosen, signatures[places[chosen] - np.uint64(starts[number])]


def hash_band(signatures: NDArray[np.uint32], start: int, rows: int) -> NDArray[np.uint64]:
    """Hash the values of a band to one number per record."""
    keys = np.full(len(signatures), start, dtype=np.uint64)
    for column in range(start, start + rows):
        keys = (keys ^ signatures[:, column]) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys
