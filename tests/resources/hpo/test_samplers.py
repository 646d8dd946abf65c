"""Bayesian search with either sampler: suggestions learned from finished trials."""

import math
import random
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from resources.hpo.search_space import sample_params
from resources.hpo.strategies import suggest_trials
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.trial import Status, Trial
from tests.resources.hpo.sweep_files import sweep

SAMPLERS = pytest.mark.parametrize("sampler", ["tpe", "gp"])


def search(sampler: str, **changes: Any) -> SweepConfig:
    return sweep(strategy="bayesian", sampler=sampler, max_trials=60, **changes)


def tried(config: SweepConfig, count: int) -> list[Trial]:
    """Sample random trials that are better the nearer their learning rate is to 1e-3."""
    trials = [
        Trial(n, "", sample_params(config.search_space, random.Random(n)), "completed", 1, step=40) for n in range(count)
    ]
    return [replace(trial, value=abs(math.log10(float(trial.params["learning_rate"])) + 3)) for trial in trials]


@SAMPLERS
def test_maximizing_mirrors_minimizing(sampler: str) -> None:
    """Opposite values must give exactly the same suggestions."""
    smaller, larger = (search(sampler, objective={"metric": "m", "direction": to}) for to in ("minimize", "maximize"))
    trials = tried(smaller, 20)
    opposite = [replace(trial, value=-trial.value) for trial in trials if trial.value is not None]
    found = suggest_trials(smaller, trials, 4)
    assert suggest_trials(larger, opposite, 4) == found != suggest_trials(smaller, opposite, 4)


@SAMPLERS
def test_sampler_learns_from_pruned_trials_and_not_from_failed_ones(sampler: str) -> None:
    """Trials pruned at the same step count as much as completed ones."""
    config = search(sampler)
    completed = tried(config, 20)
    pruned, failed = ([replace(trial, status=status) for trial in completed] for status in ("pruned", "failed"))
    found = suggest_trials(config, completed, 4)
    assert suggest_trials(config, pruned, 4) == found != suggest_trials(config, failed, 4)


def test_parzen_estimators_keep_away_from_where_trials_run() -> None:
    """Running trials repel more than failed ones, although the value of neither is known."""
    distances: dict[Status, list[float]] = {"failed": [], "running": []}
    for seed in range(8):
        config = search("tpe", seed=seed)
        trials = tried(config, 20)
        (wanted,) = suggest_trials(config, trials, 1)
        for status, found in distances.items():
            there = [Trial(number, "", wanted.params, status, 1) for number in range(20, 26)]
            (other,) = suggest_trials(config, [*trials, *there], 1)
            found.append(abs(math.log10(float(other.params["learning_rate"]) / float(wanted.params["learning_rate"]))))
    assert mean(distances["running"]) > 1.2 * mean(distances["failed"]), distances
