"""Gaussian process sampler: correct gradient, robust to outliers, bounded cost for thousands of trials."""

import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import approx_fprime
from threadpoolctl import threadpool_info, threadpool_limits

from resources.hpo import gaussian_process_sampler
from resources.hpo.gaussian_process_sampler import (
    MAX_FITTED_TRIALS,
    RANDOM_TRIALS,
    Array,
    clip_outliers,
    fit_lengths,
    negative_log_likelihood,
    select_trials,
    suggest,
)
from resources.hpo.search_space import sample_params
from resources.hpo.trial import Trial, rank_trials
from tests.resources.hpo.sweep_files import sweep

SPACE = {
    "learning_rate": {"type": "log_uniform", "min": 1e-5, "max": 1e-1},
    "lora_rank": {"type": "choice", "values": [8, 16, 32]},
}


def trials_of(count: int) -> list[Trial]:
    """Return trials, each a little worse than the one before."""
    chance = random.Random(1)
    space = sweep(search_space=SPACE).search_space
    return [Trial(number, "", sample_params(space, chance), "completed", 1, value=number / count) for number in range(count)]


@pytest.mark.parametrize("logs", [[-0.7, -0.7, -0.7, -4.6], [0.5, -3.0, 2.0, -1.0], [-3.9, 2.9, 0.0, -9.2]])
def test_gradient_matches_the_negative_log_likelihood(logs: list[float]) -> None:
    chance = np.random.default_rng(1)
    points, values = chance.random((20, 3)), chance.standard_normal(20)

    def value(at: Array) -> float:
        return negative_log_likelihood(at, points, values)[0]

    at = np.array(logs)
    assert negative_log_likelihood(at, points, values)[1] == pytest.approx(
        approx_fprime(at, value, 1e-6), rel=1e-3, abs=1e-3
    )


def test_fit_uses_only_the_best_and_newest_of_many_trials() -> None:
    config = sweep(strategy="bayesian", sampler="gp", search_space=SPACE, max_trials=10_000)
    trials = trials_of(2 * MAX_FITTED_TRIALS)
    kept = {trial.number for trial in select_trials(rank_trials(trials, "minimize"))}
    assert kept == {
        *range(MAX_FITTED_TRIALS // 2),
        *range(2 * MAX_FITTED_TRIALS - MAX_FITTED_TRIALS // 2, 2 * MAX_FITTED_TRIALS),
    }
    other = [trial if trial.number in kept else replace(trial, params=trials[0].params) for trial in trials]
    assert suggest(config, trials) == suggest(config, other)


@pytest.mark.parametrize("count", [1, MAX_FITTED_TRIALS - 1, MAX_FITTED_TRIALS])
def test_fit_uses_all_of_few_trials(count: int) -> None:
    ranked = rank_trials(trials_of(count), "minimize")
    assert sorted(trial.number for trial in select_trials(ranked)) == list(range(count))
    assert select_trials(ranked)[0] == ranked[0]


def test_suggestion_is_independent_of_the_magnitude_of_a_divergence() -> None:
    """Regression: one loss of 1e6 among losses near 1 reduced the search to chance."""
    config = sweep(strategy="bayesian", sampler="gp", search_space=SPACE, max_trials=100)
    *trials, last = trials_of(30)
    found = [suggest(config, [*trials, replace(last, value=value)]) for value in (10.0, 1e6, 1e300)]
    assert found[0] == found[1] == found[2] != suggest(config, [*trials, replace(last, value=-1.0)])


def test_outlier_limit_follows_from_the_random_trials_only() -> None:
    """After a hundred near-optimal trials the initial random ones must not become outliers."""
    first = np.linspace(0.0, 4.0, RANDOM_TRIALS)
    costs = np.concatenate([first, np.full(100, 1e-3), [1e6]])
    assert list(clip_outliers(costs, first)) == [*costs[:-1], 11.0]


def test_many_equal_best_values_do_not_clip_the_others() -> None:
    costs = np.array([1.0, 1.0, 1.0, 1.0, *range(2, 8)])
    assert list(clip_outliers(costs, costs)) == list(costs)


def test_fit_uses_one_thread_and_restores_the_thread_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one thread per core, competing with trainings, made a sweep step take seconds."""

    def cores() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    seen: list[set[int]] = []

    def noted(points: Array, values: Array) -> Array:
        seen.append(cores())
        return fit_lengths(points, values)

    monkeypatch.setattr(gaussian_process_sampler, "fit_lengths", noted)
    with threadpool_limits(limits=2, user_api="blas"):
        suggest(sweep(strategy="bayesian", sampler="gp", search_space=SPACE, max_trials=100), trials_of(20))
        assert (seen, cores()) == ([{1}], {2})
