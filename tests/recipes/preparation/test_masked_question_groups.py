"""Grouping records by their questions before and after masking, in bounded memory."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recipes.preparation.split_stage import UNCHANGED_DRAW, join_masked_questions
from recipes.records.disk_partitions import Scratch

HELD_BYTES = 300
"""Memory for about nine edges."""
SPREAD = 0x9E3779B97F4A7C15
"""Multiplier that spreads small numbers evenly in another order, because draws are hashes."""

numbers = st.integers(0, 12)
pairs = st.lists(st.tuples(numbers, numbers), max_size=40)


def joined_draws(found: list[tuple[int, int]]) -> list[int]:
    draw, masked = (np.array([pair[side] * SPREAD & UNCHANGED_DRAW for pair in found], dtype=np.uint64) for side in (0, 1))
    middle = len(found) // 3

    def ranges() -> list[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
        return [(draw[:middle], masked[:middle]), (draw[middle:], masked[middle:])]

    with TemporaryDirectory() as folder:
        column = join_masked_questions(ranges, len(found), Scratch(Path(folder), HELD_BYTES))
        if column is None:
            assert (draw == masked).all()
            return draw.tolist()
        with column:
            other = column.reader().take(len(found))
        assert not [*Path(folder).iterdir()]
    return np.where(other == np.uint64(UNCHANGED_DRAW), draw, other).tolist()


@given(pairs, st.randoms())
def test_records_are_clustered_transitively_by_either_draw(found: list[tuple[int, int]], order: Any) -> None:
    joined = joined_draws(found)
    for pair, number in zip(found, joined, strict=True):
        cluster, before = {pair}, set[tuple[int, int]]()
        while cluster != before:
            before = cluster
            cluster = {(one, two) for one, two in found if any(one == near[0] or two == near[1] for near in before)}
        assert number == min(first * SPREAD & UNCHANGED_DRAW for first, _ in cluster)
    shuffled = list(range(len(found)))
    order.shuffle(shuffled)
    assert joined_draws([found[place] for place in shuffled]) == [joined[place] for place in shuffled]


def test_a_long_chain_is_one_cluster() -> None:
    """Each record shares a question with the previous one: the lowest number propagates to all."""
    found = [pair for number in range(12) for pair in ((number, number + 100), (number + 1, number + 100))]
    assert len({*joined_draws(found)}) == 1
