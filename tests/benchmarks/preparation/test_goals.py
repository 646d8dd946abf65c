"""The data preparation benchmark reports the goals that it misses."""

import pytest

from benchmarks.preparation.__main__ import FLOOR_NAME, Cost, goals_missed
from benchmarks.preparation.peers import TYPICAL


def costs(ours: float, theirs: float | None, floor: float, kept: int = 9) -> dict[str, Cost]:
    found = {FLOOR_NAME: Cost(floor, 1, 1, None), "ours, 2 processes": Cost(ours, 1, 1, 9)}
    if theirs is not None:
        found[f"{TYPICAL.name}, 2 processes"] = Cost(theirs, 1, 1, kept)
    return found


def test_met_goals_are_not_reported() -> None:
    assert goals_missed(costs(10, 50, 8)) == goals_missed(costs(10, None, 8)) == []


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (costs(10, 49, 8), "4.9x"),
        (costs(10.5, 60, 8), "1.31 times the floor"),
        (costs(10, 50, 8, kept=8), "9 records kept"),
    ],
)
def test_missed_goal_is_reported(measured: dict[str, Cost], words: str) -> None:
    (line,) = goals_missed(measured)
    assert words in line and "ours, 2 processes" in line
