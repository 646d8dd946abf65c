"""Stop trials early, if they do not improve or others are better. Pure functions.

A trial is judged at each of its evaluations by what was known at that one, and stopped at the first that meets a rule, even
if it has trained longer by the time of the decision. So which trials are stopped, and with which value, does not depend on
when the decision is made, except that

- concurrent trials may reach a rung in any order: halving does not wait for all of them;
- a trial may fail, or be cancelled, before or after the decision: until then, the others are compared with it;
- if only the asset graph knows how long a trial trains, a trial may be stopped at its last step while it publishes its
  model, but not after it has completed.
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
    """The evaluations of a trial, up to where it was stopped.

    `may_stop` is false once the outcome is settled; `leaves_model` is false if the trial failed. A trial is not stopped at
    the last of its `steps`, because that would save nothing.
    """

    points: Sequence[Point]
    may_stop: bool = True
    leaves_model: bool = True
    steps: int | None = None

    def may_stop_at(self, point: Point) -> bool:
        return self.may_stop and (self.steps is None or point.step < self.steps)


@dataclass(frozen=True)
class EarlyStop:
    """The evaluation at which a trial is stopped, and the reason."""

    point: Point
    reason: str


def find_stops(histories: Mapping[int, TrialHistory], config: SweepConfig) -> dict[int, EarlyStop]:
    """Return the trials to stop, by number."""
    found = {}
    if early := config.early_stopping:
        reason = f"no improvement of more than {early.min_delta:g} in {pluralize(early.patience, 'evaluation')}"
        for number, history in histories.items():
            point = find_stall(history.points, early, config.objective.direction)
            if point is not None and history.may_stop_at(point):
                found[number] = EarlyStop(point, reason)
    return found if config.strategy != "successive_halving" else apply_halving(histories, config, found)


def find_stall(points: Sequence[Point], early: EarlyStopping, direction: str) -> Point | None:
    """Return the first evaluation at which the trial has stalled, or None.

    It has stalled after `patience` consecutive evaluations without an improvement of more than `min_delta` over the best.
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
    """Return `stalled` and the trials that successive halving stops.

    At a rung, it stops those that are not among the best 1 in `reduction_factor`.

    At least one trial passes each rung.

    This is asynchronous successive halving in its stopping variant (Li et al. 2020), which does not wait until a rung is
    full: a trial is compared with itself and the trials that reached the rung before it.
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
        # A trial that fails leaves no model, and so must not cause all others to be stopped.
        if number in found or histories[number].leaves_model:
            costs.insert(better, own)
    return found


def rung_arrivals(histories: Mapping[int, TrialHistory], first: int, factor: int) -> Iterator[tuple[int, int, Point]]:
    """Yield trial, rung and evaluation for each rung reached.

    They are ordered by time, then by trial number.
    """
    reached = [
        (point.time, number, rung, point)
        for number, history in histories.items()
        for rung, point in reached_rungs(history, first, factor)
    ]
    for _, number, rung, point in sorted(reached, key=lambda each: each[:3]):
        yield number, rung, point


def reached_rungs(history: TrialHistory, first: int, factor: int) -> Iterator[tuple[int, Point]]:
    """Yield the reached rungs, each with the first evaluation at or after it.

    Rungs are at `first * factor ** n` steps.
    """
    rung = first
    for point in history.points:
        while rung <= point.step:
            yield rung, point
            rung *= factor
