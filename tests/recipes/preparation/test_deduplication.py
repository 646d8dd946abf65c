"""Exact and near deduplication in bounded memory equals a reference that holds everything."""

from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recipes.contracts.parameters import NearDuplicates
from recipes.preparation.deduplication import (
    MinHashSigner,
    choose_bands,
    find_exact_duplicates,
    find_near_duplicates,
    hash_band,
)
from recipes.records.disk_partitions import Partitions, RecordNumbers, Scratch
from tests.recipes.preparation.preparation_workspace import questions

HELD_BYTES = [500, 1 << 20]
"""Memory for about twenty records, or for all of them."""
RANGE = 30


def marked(count: int, found: Iterable[RecordNumbers]) -> list[bool]:
    marks = np.zeros(count, np.bool_)
    for places in found:
        marks[places] = True
    return marks.tolist()


def in_scratch(held_bytes: int, find: Callable[[Scratch], Iterable[RecordNumbers]], count: int) -> list[bool]:
    with TemporaryDirectory() as folder:
        marks = marked(count, find(Scratch(Path(folder), held_bytes)))
        assert not [*Path(folder).iterdir()]
    return marks


@given(st.integers(0, 1 << 32), st.integers(0, 200), st.integers(1, 200), st.sampled_from(HELD_BYTES))
def test_exact_deduplication_marks_all_equal_records_but_the_first(
    seed: int, count: int, different: int, held_bytes: int
) -> None:
    random = np.random.default_rng(seed)
    known = random.integers(0, 1 << 64, (different, 2), np.uint64)
    known[: different // 3, 0] = known[0, 0]  # digests may share one of their halves
    digests = known[random.integers(0, different, count)]
    ranges = [digests[begin : begin + RANGE] for begin in range(0, count, RANGE)]
    seen, expected = set[tuple[int, ...]](), list[bool]()
    for digest in map(tuple, digests.tolist()):
        expected.append(digest in seen)
        seen.add(digest)
    assert in_scratch(held_bytes, lambda scratch: find_exact_duplicates(ranges, count, scratch), count) == expected


def test_exact_deduplication_handles_a_very_frequent_record_in_pieces(tmp_path: Path) -> None:
    digests = np.full((5_000, 2), 7, np.uint64)
    ranges = [digests[begin : begin + 100] for begin in range(0, 5_000, 100)]
    assert marked(5_000, find_exact_duplicates(ranges, 5_000, Scratch(tmp_path, 2_400))) == [False] + [True] * 4_999


def held_against_first_of_each_bucket(
    signatures: NDArray[np.uint32], kept: NDArray[np.bool_], parameters: NearDuplicates
) -> list[bool]:
    bands, width = choose_bands(parameters)
    found = np.zeros(len(signatures), np.bool_)
    for band in range(bands):
        heads: dict[int, int] = {}
        for place, key in enumerate(hash_band(signatures, band * width, width).tolist()):
            if kept[place] and heads.setdefault(key, place) != place:
                same = (signatures[place] == signatures[heads[key]]).mean()
                found[place] |= same >= parameters.threshold
    return found.tolist()


@pytest.mark.parametrize("held_bytes", [2_000, 1 << 24])
@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_near_deduplication_marks_records_close_to_the_first_of_their_bucket(
    tmp_path: Path, threshold: float, held_bytes: int
) -> None:
    parameters = NearDuplicates(threshold=threshold, permutations=32)
    random = np.random.default_rng(3)
    texts = [row["instruction"] + " " + row["answer"] for row in questions(120)]
    near = [texts[place].replace("the", word, 1) for word in ("a", "no") for place in random.integers(0, 120, 60)]
    signer = MinHashSigner(parameters)
    order = random.permutation(240)
    for place in order:
        signer.add([*texts, *near][place])
    signatures, kept = signer.signatures(), random.random(240) < 0.9
    files = [tmp_path / f"{begin}.npy" for begin in range(0, 240, RANGE)]
    for file in files:
        np.save(file, signatures[int(file.stem) : int(file.stem) + RANGE])
    expected = held_against_first_of_each_bucket(signatures, kept, parameters)
    assert 20 < sum(expected) < 150
    by_range = [kept[begin : begin + RANGE] for begin in range(0, 240, RANGE)]
    assert (
        in_scratch(held_bytes, lambda scratch: find_near_duplicates(files, by_range, 240, parameters, scratch), 240)
        == expected
    )


def test_signature_is_read_once_for_a_pair_sharing_many_bands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a third nearly equal was read per band: 55 GB for 16 million records."""
    parameters = NearDuplicates(threshold=0.8, permutations=32)
    signatures = np.random.default_rng(1).integers(0, 1 << 32, (900, 32), np.uint32)
    signatures[::3, 1:] = signatures[0, 1:]
    np.save(tmp_path / "0.npy", signatures)
    taken = 0
    does = Partitions.add

    def counting(self: Partitions, numbers: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        nonlocal taken
        taken += len(rows) if rows.dtype.names and "signature" in rows.dtype.names else 0
        does(self, numbers, rows)

    monkeypatch.setattr(Partitions, "add", counting)
    found = find_near_duplicates(
        [tmp_path / "0.npy"], [np.ones(900, np.bool_)], 900, parameters, Scratch(tmp_path / "s", 4_000)
    )
    assert sum(marked(900, found)) == 299
    assert taken == 299
