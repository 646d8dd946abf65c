"""Sweep configuration, with the server's settings as defaults."""

from typing import Any

import pytest
from pydantic import ValidationError

from resources.hpo.sweep_config import SweepConfig, SweepRequest
from resources.hpo.trial import Trial, rank_trials

SWEEP: dict[str, Any] = {
    "experiment": "doors",
    "base_config": {"max_steps": 100},
    "search_space": {"learning_rate": {"type": "uniform", "min": 1e-5, "max": 1e-3}},
    "objective": {"metric": "eval/loss"},
    "strategy": "pbt",
}


def sweep(**changed: Any) -> SweepConfig:
    return SweepConfig.model_validate(SWEEP | changed)


@pytest.mark.parametrize(
    ("max_trials", "at_once", "pbt", "population", "generations"),
    [
        (50, 8, {}, 8, 6),
        (5, 8, {}, 5, 1),
        (12, 8, {"population": 4}, 4, 3),
        (12, 8, {"population": 4, "generations": 2}, 4, 2),
        (12, 8, {"population": 4, "generations": 3}, 4, 3),
    ],
)
def test_population_and_generations_follow_from_the_trial_limit(
    max_trials: int, at_once: int, pbt: dict[str, int], population: int, generations: int
) -> None:
    found = sweep(max_trials=max_trials, max_concurrent_trials=at_once, pbt=pbt)
    assert (found.population, found.generations) == (population, generations)
    assert found.wanted_trials == population * generations


@pytest.mark.parametrize(
    ("pbt", "said"),
    [
        ({"population": 13}, "13 members in 1 generation are 13 trials and max_trials is 12"),
        ({"population": 4, "generations": 4}, "4 members in 4 generations are 16 trials"),
        ({"population": 13, "generations": 1}, "are 13 trials"),
    ],
)
def test_population_beyond_the_trial_limit_is_refused(pbt: dict[str, int], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        sweep(max_trials=12, pbt=pbt)


@pytest.mark.parametrize("key", ["lora_rank", "lora_target_modules", "method", "base_model"])
def test_pbt_over_keys_that_change_weight_shapes_is_refused(key: str) -> None:
    choice = {key: {"type": "choice", "values": ["a", "b"]}}
    with pytest.raises(ValidationError, match=f"strategy pbt copies weights, and {key} changes their shape"):
        sweep(search_space=choice)
    assert sweep(search_space=choice, strategy="random").wanted_trials == 50


@pytest.mark.requirement("Z14")
def test_unset_keys_of_a_sweep_take_the_server_settings() -> None:
    silent = SweepRequest.model_validate({key: value for key, value in SWEEP.items() if key != "strategy"})
    found = silent.completed("random", 3)
    assert (found.strategy, found.max_concurrent_trials) == ("random", 3)
    explicit = SweepRequest.model_validate(SWEEP | {"max_concurrent_trials": 2}).completed("random", 3)
    assert (explicit.strategy, explicit.max_concurrent_trials) == ("pbt", 2)


def test_earlier_of_equal_trials_ranks_first() -> None:
    trials = [Trial(number, f"j{number}", {}, "completed", 0, value=1.0) for number in (2, 0, 1)]
    for direction in ("minimize", "maximize"):
        assert [trial.number for trial in rank_trials(trials, direction)] == [0, 1, 2]
