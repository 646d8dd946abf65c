"""Why a trial should be stopped early: no progress for a while (row K2), or others are better (row K5). Pure functions."""

import math
from collections.abc import Sequence

from resources.hpo.config import EarlyStopping, SweepConfig
from resources.hpo.trial import Point, cost


def reason_to_stop(points: Sequence[Point], others: Sequence[Sequence[Point]], config: SweepConfig) -> str:
    """One line, or nothing where the trial goes on. `others` are the objectives of those that it is judged by."""
    early, direction = config.early_stopping, config.objective.direction
    if early is not None and stalled(points, early, direction):
        return f"no improvement of more than {early.min_delta:g} in {early.patience} evaluations"
    if config.strategy != "successive_halving":
        return ""
    rung = last_rung(points, config.first_rung, config.successive_halving.reduction_factor)
    if rung is not None and not is_kept(rung, points, others, config):
        return f"not among the best 1 in {config.successive_halving.reduction_factor} at step {rung}"
    return ""


def stalled(points: Sequence[Point], early: EarlyStopping, direction: str) -> bool:
    """Whether the newest `patience` evaluations, in a row, have not been better than the best before by `min_delta`."""
    best, waited = math.inf, 0
    for point in points:
        now = cost(point.value, direction)
        if now < best - early.min_delta or (math.isinf(best) and not math.isinf(now)):
            best, waited = now, 0
        else:
            waited += 1
    return waited >= early.patience


def last_rung(points: Sequence[Point], first: int, factor: int) -> int | None:
    """The highest of `first`, `first * factor`, `first * factor ** 2`, ... steps that was reached; None before the first."""
    reached = points[-1].step if points else 0
    rung = None
    while first <= reached:
        rung, first = first, first * factor
    return rung


def is_kept(rung: int, points: Sequence[Point], others: Sequence[Sequence[Point]], config: SweepConfig) -> bool:
    """Whether a trial is among the best 1 in `reduction_factor` of all that reached the rung, or the best of too few.

    Asynchronous successive halving in its stopping form (Li et al. 2020): nobody waits until a rung is full; a trial is
    judged at the highest rung that it has reached, again whenever another one gets there.
    """
    direction = config.objective.direction
    costs = sorted(cost(value, direction) for trial in (points, *others) if (value := value_at(rung, trial)) is not None)
    own = value_at(rung, points)
    kept = max(1, len(costs) // config.successive_halving.reduction_factor)
    return own is None or cost(own, direction) <= costs[kept - 1]


def value_at(rung: int, points: Sequence[Point]) -> float | None:
    """The first value that was logged at the rung's step or later."""
    return next((point.value for point in points if point.step >= rung), None)
