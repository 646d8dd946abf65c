"""How a job of several processes ends: as the first of them did, or killed where one was."""

import pytest

from recipes.schema import EXIT_BAD_CONFIGURATION, EXIT_PREEMPTED
from recipes.torchrun import exit_code


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([EXIT_BAD_CONFIGURATION], EXIT_BAD_CONFIGURATION),
        ([EXIT_PREEMPTED, 1], EXIT_PREEMPTED),
        ([1, -9], 137),  # the other failed for want of it
        ([-11], 139),
    ],
)
def test_the_code_is_told_on(codes: list[int], expected: int) -> None:
    assert exit_code(codes) == expected
