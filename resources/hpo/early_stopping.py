"""Where a trial is stopped early: no progress for a while (row K2), or others are better (row K5). Pure functions.

A trial is judged at each of its evaluations by what was there at that one, and is stopped at the first that meets a rule,
however long it trains until somebody looks: who is stopped, and with which value, does not depend on when that is. It still
depends on

- which of several that run at once gets to a rung first: halving does not wait until all are there;
- whether one that fails, or is cancelled, has by the time of a look: the others are judged by it until then;
- the look where only the asset graph knows how long a trial trains: at its last step it is stopped while it publishes, and
  not once it is completed.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recipes.contracts.quantities import pluralize
from resources.hpo.sweep_config import EarlyStopping, SweepConfig
from resources.hpo.trial import Point, cost


@dataclass(frozen=True)
class TrialHistory:
    """The evaluations of a trial so far, up to where it was stopped. It `may_stop` unless that is settled; it `leaves_model`
    unless it failed. At the last of its `steps` it has done all: to stop it there saves nothing.
    """

    points: Sequence[Point]
    may_stop: bool = True
    leaves_model: bool = True
    steps: int | None = None

    def may_stop_at(self, point: Point) -> bool:
        return self.may_stop and (self.steps is None or point.step < self.steps)


@dataclass(frozen=True)
class EarlyStop:
    """At which evaluation a trial is stopped, and why."""

    point: Point
    reason: str


def find_stops(histories: Mapping[int, TrialHistory], config: SweepConfig) -> dict[int, EarlyStop]:
    """Those of all trials, by number, that are to be stopped."""
    found = {}
    if early := config.early_stopping:
        reason = f"no improvement of more than {early.min_delta:g} in {pluralize(early.patience, 'evaluation')}"
        for number, history in histories.items():
            point = find_stall(history.points, early, config.objective.direction)
            if point is not None and history.may_stop_at(point):
                found[number] = EarlyStop(point, reason)
    return found if config.strategy != "successive_halving" else apply_halving(histories, config, found)


def find_stall(points: Sequence[Point], early: EarlyStopping, direction: str) -> Point | None:
    """The first evaluation that is the last of `patience`, in a row, none of which was better than the best before by more
    than `min_delta`.
    """
    best, waited = math.inf, 0
    for point in points:
        now = cost(point.value, direction)
        if now < best - early.min_delta:
            best, waited = now, 0
        else:
            waited += 1
        if waited >= early.patience:
            return point
    return None


def apply_halving(
    histories: Mapping[int, TrialHistory], config: SweepConfig, stalled: Mapping[int, EarlyStop]
) -> dict[int, EarlyStop]:
    """With those that are not among the best 1 in `reduction_factor` at a rung, or the best of too few.

    Asynchronous successive halving in its stopping form (Li et al. 2020): nobody waits until a rung is full. A trial is
    judged as it gets there, by itself and those that were there before.
    """
    found, factor, direction = dict(stalled), config.successive_halving.reduction_factor, config.objective.direction
    rung_costs: dict[int, list[float]] = defaultdict(list)
    for number, rung, point in rung_arrivals(histories, config.first_rung, factor):
        if number in found and point.step > found[number].point.step:
            continue
        costs, own = rung_costs[rung], cost(point.value, direction)
        better = bisect_left(costs, own)
        if better >= max(1, (len(costs) + 1) // factor) and histories[number].may_stop_at(point):
            found[number] = EarlyStop(point, f"not among the best 1 in {factor} at step {rung}")
        # Of the others, one that fails leaves no model, and so must not be what all others are stopped for.
        if number in found or histories[number].leaves_model:
            costs.insert(better, own)
    return found


def rung_arrivals(histories: Mapping[int, TrialHistory], first: int, factor: int) -> Iterator[tuple[int, int, Point]]:
    """Which trial got to which rung at which evaluation, in the order of time; of one time, in that of their numbers."""
    reached = [
        (point.time, number, rung, point)
        for number, history in histories.items()
        for rung, point in reached_rungs(history, first, factor)
    ]
    for _, number, rung, point in sorted(reached, key=lambda each: each[:3]):
        yield number, rung, point


def reached_rungs(history: TrialHistory, first: int, factor: int) -> Iterator[tuple[int, Point]]:
    """Of `first`, `first * factor`, `first * factor ** 2`, ... steps those that were reached, and the first evaluation there
    or later.
    """
    rung = first
    for point in history.points:
        while rung <= point.step:
            yield rung, point
            rung *= factor
