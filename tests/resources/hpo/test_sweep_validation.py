"""Sweep validation: keys of another strategy are refused rather than silently ignored."""

from typing import Any

import pytest

from resources.errors import HanzoError
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.sweep_validation import check_sweep
from tests.resources.hpo.sweep_files import sweep


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sampler": "gp"}, "sampler is only used by strategy bayesian, and this one is random: remove it"),
        ({"sampler": "gp", "strategy": "successive_halving"}, "sampler is only used by strategy bayesian"),
        ({"pbt": {"population": 4}}, "pbt is only used by strategy pbt"),
        ({"successive_halving": {"min_steps": 5}}, "successive_halving is only used by strategy successive_halving"),
    ],
)
def test_a_key_of_another_strategy_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(HanzoError) as refused:
        check_sweep(sweep(**given))
    assert refused.value.message.startswith(said)


@pytest.mark.parametrize(
    "given",
    [
        {"strategy": "bayesian", "sampler": "gp"},
        {"strategy": "pbt", "pbt": {"population": 2}},
        {"strategy": "successive_halving", "successive_halving": {"min_steps": 5}},
        {"early_stopping": {"patience": 3}},
    ],
)
def test_key_of_the_own_strategy_is_accepted(given: dict[str, Any]) -> None:
    check_sweep(sweep(**given))


@pytest.mark.parametrize("strategy", ["bayesian", "grid", "random", "pbt", "successive_halving"])
def test_sweep_returned_by_the_api_can_be_submitted_again(strategy: str) -> None:
    """It contains the keys of all strategies, with their defaults."""
    space = {"learning_rate": {"type": "choice", "values": [1e-4, 1e-3]}}
    answered = sweep(strategy=strategy, search_space=space).model_dump(mode="json")
    assert {"sampler", "pbt", "successive_halving"} < answered.keys()
    check_sweep(SweepConfig.model_validate(answered))
