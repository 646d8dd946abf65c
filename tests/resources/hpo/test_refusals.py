"""What a sweep says of another strategy than its own is refused: it would be searched as if it had not been said."""

from typing import Any

import pytest

from resources.errors import HanzoError
from resources.hpo.refusals import check_sweep
from tests.resources.hpo.sweep_files import sweep


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sampler": "gp"}, "sampler is of strategy bayesian, and this one is random: remove it"),
        ({"sampler": "tpe", "strategy": "successive_halving"}, "sampler is of strategy bayesian"),
        ({"pbt": {"population": 4}}, "pbt is of strategy pbt"),
        ({"successive_halving": {"min_steps": 5}}, "successive_halving is of strategy successive_halving"),
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
def test_a_key_of_its_own_is_taken(given: dict[str, Any]) -> None:
    check_sweep(sweep(**given))
