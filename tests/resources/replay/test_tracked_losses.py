"""Detection of wrong tracked losses, at steps executed once and more than once."""

import pytest

from resources.replay.comparison import StepDifference
from resources.replay.verdict import find_wrong_loss

LOSSES = {1: 2.5, 2: 1.25}


@pytest.mark.parametrize(
    ("tracked", "untrue"),
    [
        ([1.25], None),
        ([1.25 * 1.01, 1.25], None),
        ([9.0, 1.25], None),  # the loss of the first execution
        ([9.0], 9.0),  # it replaces the run's own loss
        ([9.0, 7.0], 7.0),
        ([9.0, 1.25, 7.0], 7.0),  # executed twice, not three times
    ],
)
def test_repeated_step_may_have_one_further_tracked_loss(tracked: list[float], untrue: float | None) -> None:
    expected = StepDifference(step=2, then=1.25, now=untrue) if untrue else None
    assert find_wrong_loss(LOSSES, {1: [2.5], 2: tracked}, [range(2, 3)]) == expected


def test_untracked_step_is_not_reported_as_wrong() -> None:
    assert find_wrong_loss(LOSSES, {3: [9.0]}) is None and find_wrong_loss(LOSSES, {1: [2.5]}) is None
