"""The status line of a sweep above its trials."""

import pytest

from hanzo_ml.cli.hpo import describe_sweep

SWEEP = {"id": "a1", "status": "failed", "trials": {}, "max_trials": 50, "strategy": "bayesian", "reason": ""}


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({}, "a1 failed: no trial of 50 by bayesian"),
        ({"reason": "its base model is not pinned"}, "a1 failed: no trial of 50 by bayesian: its base model is not pinned"),
        (
            {"status": "running", "trials": {"running": 1, "completed": 4}},
            "a1 running: 4 completed, 1 running of 50 by bayesian",
        ),
    ],
)
def test_sweep_end_reason_is_separated_from_its_strategy(sweep: dict[str, object], said: str) -> None:
    """Strategy and first word of the reason were joined."""
    assert describe_sweep({**SWEEP, **sweep}) == said
