"""Metric points, and which of them a resumed run must not log again."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hanzo_ml.client.repeated_steps import RepeatedSteps, last_repeat_time

MAX_METRICS_PER_REQUEST = 1000
"""MLflow's limit of metrics in one request."""


@dataclass(frozen=True)
class Point:
    """One value of a metric. `timestamp` is in milliseconds since 1970; sent twice with all four equal, it counts once."""

    key: str
    value: float
    step: int
    timestamp: int

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint and for the wire: JSON has no NaN and no infinity, so they are strings."""
        if math.isfinite(self.value):
            return asdict(self)
        word = "NaN" if math.isnan(self.value) else "Infinity" if self.value > 0 else "-Infinity"
        return {**asdict(self), "value": word}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Point":
        return cls(str(data["key"]), float(data["value"]), int(data["step"]), int(data["timestamp"]))


@dataclass(frozen=True)
class ResumeFilter:
    """What a resumed run must not log again: the server has steps up to `newest[key]`, training goes on after `step`.

    The queue is sent in order, so all steps up to the newest one are there. Values at or below `step` are not computed a
    second time: a key that is always logged at step 0 stays new. Of the steps `repeated`, which the run now does otherwise
    than before, those up to `again[key]` are there as they are now: `newest_repeated_step` finds it.
    """

    step: int
    newest: Mapping[str, int]
    repeated: Sequence[RepeatedSteps] = ()
    again: Mapping[str, int] = field(default_factory=dict)

    def is_known(self, point: Point) -> bool:
        """Of what is logged from now on."""
        return self.step < point.step and self.is_logged(point)

    def is_logged(self, point: Point) -> bool:
        """Of what a predecessor had pending. It may have been another's second time at a step: of one that was killed after
        it had sent its values, and before its checkpoint."""
        there = self.newest if last_repeat_time(self.repeated, point.step) is None else self.again
        return point.key in there and point.step <= there[point.key]


def drop_known_points(points: Iterable[Point], resumption: ResumeFilter) -> list[Point]:
    return [point for point in points if not resumption.is_known(point)]


def newest_repeated_step(history: Iterable[tuple[int, int]], repeated: Sequence[RepeatedSteps]) -> int | None:
    """The newest of the steps `repeated` in a key's history, as pairs of step and time, that is of the second time."""
    until = ((step, time, last_repeat_time(repeated, step)) for step, time in history)
    return max((step for step, time, first in until if first is not None and time > first), default=None)


def parse_newest_steps(run: Mapping[str, Any]) -> dict[str, int]:
    """The newest step of every key in the answer of MLflow's `runs/get`."""
    metrics = run["run"]["data"].get("metrics", [])
    return {metric["key"]: int(metric.get("step", 0)) for metric in metrics}
