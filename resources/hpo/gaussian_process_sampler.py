"""Bayesian search with a Gaussian process and expected improvement, for `sampler: gp`.

Optuna has one too, but it needs torch, which the control plane does not have. For the tens of trials of a sweep, exact
inference in NumPy takes milliseconds; beyond `MAX_FITTED_TRIALS`, trials are left out. The kernel is Matérn 5/2 with one
length scale per hyperparameter, chosen by the marginal likelihood (Rasmussen and Williams 2006, algorithm 2.1).
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
"""Number of random trials at the beginning; Optuna's estimator uses as many."""
RANDOM_CANDIDATES, NEIGHBOURS = 1000, 200
MAX_FITTED_TRIALS = 300
"""Maximum number of trials in a fit, half of them the best and half the newest.

The time grows with the cube of their number, and a fit to thousands would delay all other sweeps.
"""
OUTLIER_FACTOR = 10.0
"""Costs above the lower quartile are clipped at this multiple of the distance from the best cost to the quartile."""
LENGTH_BOUNDS = (np.log(0.02), np.log(20.0))
"""Bounds of the logarithm of a length scale, in shares of a hyperparameter's axis."""
MAX_ITERATIONS = 30
NOISE_BOUNDS = (np.log(1e-4), np.log(1.0))


@dataclass(frozen=True)
class Surrogate:
    """A process that was fitted to standardized costs at points in the unit cube."""

    points: Array
    logs: Array
    factor: tuple[Array, bool]
    weights: Array

    def predict(self, at: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation at each row of `at`."""
        across = kernel(at, self.points, self.logs)
        explained = np.einsum("ij,ji->i", across, cho_solve(self.factor, across.T))
        return across @ self.weights, np.sqrt(np.maximum(1.0 - explained, 1e-12))


def suggest(config: SweepConfig, trials: Sequence[Trial]) -> Params:
    """Suggest the next params. The result is deterministic; running trials count with their predicted mean.

    BLAS is limited to one thread: while training used the other cores, several threads took 20 times as long for matrices of
    this size, and rounding depended on their number.
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
    """Clip the costs of outliers.

    Costs are limited to the lower quartile plus `OUTLIER_FACTOR` times the distance of the best cost from it.

    Otherwise, after one diverged trial, all others look the same to the process: it did no better than random search. The
    quartile is that of the first trials, which are random; later ones lie ever closer together.
    """
    quartile = float(np.quantile(first, 0.25))
    reach = OUTLIER_FACTOR * (quartile - costs.min())
    return np.minimum(costs, quartile + reach) if reach else costs


def select_trials(selected: Sequence[Trial]) -> list[Trial]:
    """Return the best and the newest trials, starting with the best."""
    best, others = selected[: MAX_FITTED_TRIALS // 2], selected[MAX_FITTED_TRIALS // 2 :]
    return [*best, *sorted(others, key=lambda trial: trial.number)[-(MAX_FITTED_TRIALS - MAX_FITTED_TRIALS // 2) :]]


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """Return the expected improvement of each candidate over the best cost so far."""
    scaled = (best - mean) / deviation
    improvement: Array = (best - mean) * norm.cdf(scaled) + deviation * norm.pdf(scaled)
    return improvement


def encode_params(space: Space, params: Params) -> list[float]:
    """Return the params as a point in the unit cube.

    A number is its share of its axis; a choice has one axis for each of its values.
    """
    found: list[float] = []
    for name, dimension in space.items():
        if isinstance(dimension, Choice):
            found += [float(value == params[name]) for value in dimension.values]
        else:
            found.append(axis_share(dimension, params[name]))
    return found


def kernel(left: Array, right: Array, logs: Array) -> Array:
    """Return the Matérn 5/2 kernel between the rows of both.

    The last of `logs` is the noise.
    """
    distance = distances(left / np.exp(logs[:-1]), right / np.exp(logs[:-1]))
    similar: Array = (1.0 + distance + np.square(distance) / 3.0) * np.exp(-distance)
    return similar


def distances(left: Array, right: Array) -> Array:
    """Return the distances between the rows of both, times the square root of 5.

    They are computed as a product, not as a difference per axis: a choice has as many axes as values.
    """
    squares = np.square(left).sum(axis=1)[:, None] + np.square(right).sum(axis=1)[None, :] - 2.0 * left @ right.T
    root: Array = np.sqrt(5.0 * np.maximum(squares, 0.0))
    return root


def fit_surrogate(points: Array, values: Array, logs: Array) -> Surrogate:
    covariance = kernel(points, points, logs) + (np.exp(logs[-1]) + 1e-8) * np.eye(len(points))
    factor = cho_factor(covariance, lower=True)
    return Surrogate(points, logs, factor, cho_solve(factor, values))


def fit_lengths(points: Array, values: Array) -> Array:
    """Return the logarithms of length scales and noise that maximize the likelihood of the values."""

    start = np.array([np.log(0.5)] * points.shape[1] + [np.log(1e-2)])
    bounds = [LENGTH_BOUNDS] * points.shape[1] + [NOISE_BOUNDS]
    given, options = (points, values), {"maxiter": MAX_ITERATIONS}
    found = minimize(negative_log_likelihood, start, given, method="L-BFGS-B", jac=True, bounds=bounds, options=options)
    return np.asarray(found.x)


def negative_log_likelihood(logs: Array, points: Array, values: Array) -> tuple[float, Array]:
    """Return the negative log-likelihood of the values, and its gradient.

    The likelihood is up to a constant; the gradient is with respect to `logs`.

    With the gradient (Rasmussen and Williams 2006, equation 5.9), the number of evaluations does not grow with the axes.
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
