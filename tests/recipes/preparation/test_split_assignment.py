"""Partitioned split assignment equals this reference, which holds all records at once."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recipes.contracts.parameters import SplitParameters
from recipes.preparation.split_assignment import SPLITS, TRAIN, assign_splits, count_leaks
from recipes.records.disk_partitions import Scratch

HELD_BYTES = 240
"""Memory for ten records."""


def at_once(draw: NDArray[np.uint64], groups: NDArray[np.uint64], parameters: SplitParameters) -> NDArray[np.int8]:
    """Assign splits: test takes the first distinct draws, by rank within group, then draw."""
    clusters, first, member = np.unique(draw, return_index=True, return_inverse=True)
    group = groups[first]
    by_group = np.lexsort((clusters, group))
    places = np.arange(len(by_group))
    begins = np.r_[True, group[by_group[1:]] != group[by_group[:-1]]] if len(by_group) else np.zeros(0, dtype=bool)
    rank = np.empty(len(by_group), dtype=np.int64)
    rank[by_group] = places - np.maximum.accumulate(np.where(begins, places, 0))
    order = np.lexsort((clusters, rank))
    test, validation = round(len(order) * parameters.test), round(len(order) * parameters.validation)
    chosen = np.full(len(order), TRAIN, dtype=np.int8)
    chosen[order[:test]] = SPLITS.index("test")
    chosen[order[test : test + validation]] = SPLITS.index("validation")
    return chosen[member]


def in_partitions(draw: NDArray[np.uint64], groups: NDArray[np.uint64], parameters: SplitParameters) -> NDArray[np.int8]:
    ranges = [slice(begin, begin + 7) for begin in range(0, len(draw), 7)]
    with TemporaryDirectory() as folder:
        records = ((draw[part], groups[part]) for part in ranges)
        with assign_splits(records, len(draw), parameters, Scratch(Path(folder), HELD_BYTES)) as splits:
            found = splits.reader().take(len(draw))
        assert not [*Path(folder).iterdir()]
    return found


@given(st.integers(0, 1 << 32), st.integers(10, 300), st.integers(1, 60), st.integers(1, 300), st.sampled_from([0.1, 0.3]))
def test_partitioned_split_assignment_equals_in_memory_assignment(
    seed: int, count: int, groups: int, questions: int, share: float
) -> None:
    random = np.random.default_rng(seed)
    draws = random.integers(0, 1 << 64, questions, np.uint64)
    draw, group = draws[random.integers(0, questions, count)], random.integers(0, groups, count).astype(np.uint64)
    parameters = SplitParameters(test=share, validation=0.2)
    expected = at_once(draw, group, parameters)
    assume(len(np.unique(expected)) == len(SPLITS))
    assert (in_partitions(draw, group, parameters) == expected).all()


@pytest.mark.parametrize("groups", [1, 7])
def test_records_trained_on_by_an_older_version_never_become_test(groups: int) -> None:
    parameters = SplitParameters(group_by="fact" if groups > 1 else None)
    draw = np.random.default_rng(1).integers(0, 1 << 63, 800).astype(np.uint64)
    group = (np.arange(800) % groups).astype(np.uint64)
    trained = np.zeros(800, dtype=bool)
    for count in (400, 404, 440, 600, 800):
        places = in_partitions(draw[:count], group[:count], parameters)
        assert not trained[:count][places == SPLITS.index("test")].any()
        trained[:count] |= places == SPLITS.index("train")


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(range(len(SPLITS)))), max_size=60))
def test_leaks_count_held_out_records_whose_question_is_in_training(records: list[tuple[int, int]]) -> None:
    draw = np.array([draw << 60 for draw, _ in records], np.uint64)
    splits = np.array([split for _, split in records], np.int8)
    with TemporaryDirectory() as folder:
        found = count_leaks([(draw[:20], splits[:20]), (draw[20:], splits[20:])], len(draw), Scratch(Path(folder), 60))
    trained = {draw for draw, split in records if split == TRAIN}
    assert found == sum(draw in trained for draw, split in records if split != TRAIN)
