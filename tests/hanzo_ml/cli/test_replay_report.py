"""The verdict on a replay as users read it."""

from typing import Any

import pytest

from hanzo_ml.cli.run import verdict_lines

SAME: dict[str, Any] = {"first_difference": None, "untrue": None, "weights": [], "unrepeated": [], "environment": []}


@pytest.mark.parametrize(
    ("steps", "said"), [(1, "reproduced: the one loss is equal"), (1200, "reproduced: all 1,200 losses are equal")]
)
def test_verdict_uses_singular_for_one_step(steps: int, said: str) -> None:
    assert verdict_lines({**SAME, "equal": True, "steps": steps}) == [said, "the final weights are equal"]
