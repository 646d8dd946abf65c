"""Bayesian search with a Gaussian process and expected improvement (rows K3, Z13), for a sweep that says `sampler: gp`.

Optuna has one too, which needs torch: the control plane has none. With the tens of trials of a sweep, exact inference in
NumPy takes milliseconds; of more than `MAX_FITTED_TRIALS`, the others are left out. Matérn 5/2 kernel with one length for
each hyperparameter, chosen by the marginal likelihood; Rasmussen and Williams 2006, algorithm 2.1.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize
from scipy.stats import norm
from threadpoolctl import threadpool_limits

from resources.hpo.search_space import Choice, Params, Space, axis_share, perturb_params, sample_params
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.trial import Trial, cost, rank_trials

Array = NDArray[np.float64]
RANDOM_TRIALS = 10
"""Trials by chance, before there is anything to learn from; as many as Optuna's estimator takes."""
RANDOM_CANDIDATES, NEIGHBOURS = 1000, 200
MAX_FITTED_TRIALS = 300
"""Trials that a process is fitted to, half of them the best and half the newest: it takes the third power of their number,
and one look at thousands would hold up all other sweeps.
"""
OUTLIER_FACTOR = 10.0
"""How far above what is usual a trial counts, in times that the best is below it: what is farther counts as no worse."""
LENGTH_BOUNDS = (np.log(0.02), np.log(20.0))
"""Of a length, in shares of a hyperparameter's axis, as logarithms."""
MAX_ITERATIONS = 30
NOISE_BOUNDS = (np.log(1e-4), np.log(1.0))


@dataclass(frozen=True)
class Surrogate:
    """A process that was fitted to standardized costs at points of the unit cube."""

    points: Array
    logs: Array
    factor: tuple[Array, bool]
    weights: Array

    def predict(self, at: Array) -> tuple[Array, Array]:
        """Mean and standard deviation at each row of `at`."""
        across = kernel(at, self.points, self.logs)
        explained = np.einsum("ij,ji->i", across, cho_solve(self.factor, across.T))
        return across @ self.weights, np.sqrt(np.maximum(1.0 - explained, 1e-12))


def suggest(config: SweepConfig, trials: Sequence[Trial]) -> Params:
    """What to try after the given trials; the same for the same trials. Of those that run still, the mean is believed.

    On one core: where trainings have the others, threads that wait for each other at matrices of this size took 20 times as
    long, and rounded as their number was.
    """
    with threadpool_limits(limits=1, user_api="blas"):
        return best_candidate(config, trials)


def best_candidate(config: SweepConfig, trials: Sequence[Trial]) -> Params:
    space, direction = config.search_space, config.objective.direction
    rng = random.Random(f"{config.seed}/{len(trials)}")
    counting = rank_trials(trials, direction)
    if len(counting) < RANDOM_TRIALS:
        return sample_params(space, rng)
    selected = select_trials(counting)
    first = trial_costs(sorted(counting, key=lambda trial: trial.number)[:RANDOM_TRIALS], direction)
    costs = clip_outliers(trial_costs(selected, direction), first)
    values = (costs - costs.mean()) / (costs.std() or 1.0)
    points = np.array([encode_params(space, trial.params) for trial in selected])
    logs = fit_lengths(points, values)
    if running := [encode_params(space, trial.params) for trial in trials if not trial.has_ended]:
        believed, _ = fit_surrogate(points, values, logs).predict(np.array(running))
        points, values = np.vstack([points, running]), np.concatenate([values, believed])
    candidates = [sample_params(space, rng) for _ in range(RANDOM_CANDIDATES)]
    candidates += [perturb_params(space, selected[0].params, rng) for _ in range(NEIGHBOURS)]
    mean, deviation = fit_surrogate(points, values, logs).predict(
        np.array([encode_params(space, params) for params in candidates])
    )
    return candidates[int(np.argmax(expected_improvement(mean, deviation, float(values.min()))))]


def trial_costs(trials: Sequence[Trial], direction: str) -> Array:
    return np.array([cost(trial.value, direction) for trial in trials if trial.value is not None])


def clip_outliers(costs: Array, first: Array) -> Array:
    """None is farther above the lower quartile of the first ones than `OUTLIER_FACTOR` times what the best is below it.
    Where one trial
    had diverged, all others were the same to the process, and it found no more than chance does. The first ones are there by
    chance: what comes later lies ever closer together.
    """
    quartile = float(np.quantile(first, 0.25))
    reach = OUTLIER_FACTOR * (quartile - costs.min())
    return np.minimum(costs, quartile + reach) if reach else costs


def select_trials(selected: Sequence[Trial]) -> list[Trial]:
    """The best and the newest of trials, of which the best is the first. It stays the first."""
    best, others = selected[: MAX_FITTED_TRIALS // 2], selected[MAX_FITTED_TRIALS // 2 :]
    return [*best, *sorted(others, key=lambda trial: trial.number)[-(MAX_FITTED_TRIALS - MAX_FITTED_TRIALS // 2) :]]


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """By how much each candidate is expected to be below the best cost so far."""
    scaled = (best - mean) / deviation
    improvement: Array = (best - mean) * norm.cdf(scaled) + deviation * norm.pdf(scaled)
    return improvement


def encode_params(space: Space, params: Params) -> list[float]:
    """A point of the unit cube: a number as its share of its axis, a choice as one axis for each of its values."""
    found: list[float] = []
    for name, dimension in space.items():
        if isinstance(dimension, Choice):
            found += [float(value == params[name]) for value in dimension.values]
        else:
            found.append(axis_share(dimension, params[name]))
    return found


def kernel(left: Array, right: Array, logs: Array) -> Array:
    """Matérn 5/2 between the rows of both; the last of `logs` is the noise's."""
    distance = distances(left / np.exp(logs[:-1]), right / np.exp(logs[:-1]))
    similar: Array = (1.0 + distance + np.square(distance) / 3.0) * np.exp(-distance)
    return similar


def distances(left: Array, right: Array) -> Array:
    """Between the rows of both, times the root of 5. A product, and no difference for each axis: a choice has as many axes
    as it has values.
    """
    squares = np.square(left).sum(axis=1)[:, None] + np.square(right).sum(axis=1)[None, :] - 2.0 * left @ right.T
    root: Array = np.sqrt(5.0 * np.maximum(squares, 0.0))
    return root


def fit_surrogate(points: Array, values: Array, logs: Array) -> Surrogate:
    covariance = kernel(points, points, logs) + (np.exp(logs[-1]) + 1e-8) * np.eye(len(points))
    factor = cho_factor(covariance, lower=True)
    return Surrogate(points, logs, factor, cho_solve(factor, values))


def fit_lengths(points: Array, values: Array) -> Array:
    """The logarithms of lengths and noise under which the values are most likely."""

    start = np.array([np.log(0.5)] * points.shape[1] + [np.log(1e-2)])
    bounds = [LENGTH_BOUNDS] * points.shape[1] + [NOISE_BOUNDS]
    given, options = (points, values), {"maxiter": MAX_ITERATIONS}
    found = minimize(negative_log_likelihood, start, given, method="L-BFGS-B", jac=True, bounds=bounds, options=options)
    return np.asarray(found.x)


def negative_log_likelihood(logs: Array, points: Array, values: Array) -> tuple[float, Array]:
    """The negative logarithm of the values' likelihood, but for a constant, and its slope in each of `logs`.

    With the slope (Rasmussen and Williams 2006, equation 5.9) the fit asks as often for a hundred axes as for one.
    """
    fitted = fit_surrogate(points, values, logs)
    value = float(0.5 * values @ fitted.weights + np.log(np.diag(fitted.factor[0])).sum())
    slope = cho_solve(fitted.factor, np.eye(len(points))) - np.outer(fitted.weights, fitted.weights)
    scaled = points / np.exp(logs[:-1])
    distance = distances(scaled, scaled)
    pull = slope * (5.0 / 3.0) * (1.0 + distance) * np.exp(-distance)
    # The sum of pull[i, j] * (scaled[i, k] - scaled[j, k]) ** 2, for each axis k.
    lengths = 2.0 * (pull.sum(axis=1) @ np.square(scaled) - (scaled * (pull @ scaled)).sum(axis=0))
    return value, 0.5 * np.append(lengths, np.exp(logs[-1]) * np.trace(slope))
