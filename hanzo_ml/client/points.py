"""Metric points, and which of them a resumed run must not log again."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hanzo_ml.client.repeated_steps import RepeatedSteps, last_repeat_time

MAX_METRICS_PER_REQUEST = 1000
"""MLflow's limit for the metrics in one request."""


@dataclass(frozen=True)
class Point:
    """One value of a metric. `timestamp` is in milliseconds since 1970. Equal points count once."""

    key: str
    value: float
    step: int
    timestamp: int

    def to_json(self) -> dict[str, Any]:
        """Return the point for a checkpoint or a request.

        JSON has no NaN and no infinity, so they become strings.
        """
        if math.isfinite(self.value):
            return asdict(self)
        word = "NaN" if math.isnan(self.value) else "Infinity" if self.value > 0 else "-Infinity"
        return {**asdict(self), "value": word}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Point":
        return cls(str(data["key"]), float(data["value"]), int(data["step"]), int(data["timestamp"]))


@dataclass(frozen=True)
class ResumeFilter:
    """The points that a resumed run must not log again.

    The server has steps up to `newest[key]`. Training resumes after `step`. The queue is sent in order, so all steps up to
    the newest one are stored. Values at or below `step` are not computed again, so they are new: a key may always be logged
    at step 0. For the steps in `repeated`, which the run trains differently this time, the new values up to `again[key]` are
    stored (see `newest_repeated_step`).
    """

    step: int
    newest: Mapping[str, int]
    repeated: Sequence[RepeatedSteps] = ()
    again: Mapping[str, int] = field(default_factory=dict)

    def is_known(self, point: Point) -> bool:
        """Return whether a point that is logged from now on is already stored."""
        return self.step < point.step and self.is_logged(point)

    def is_logged(self, point: Point) -> bool:
        """Return whether a point that was pending in the checkpoint is already stored.

        It may come from an earlier repetition of its step, by a process that was killed after it had sent its values and
        before its next checkpoint.
        """
        there = self.newest if last_repeat_time(self.repeated, point.step) is None else self.again
        return point.key in there and point.step <= there[point.key]


def drop_known_points(points: Iterable[Point], resumption: ResumeFilter) -> list[Point]:
    return [point for point in points if not resumption.is_known(point)]


def newest_repeated_step(history: Iterable[tuple[int, int]], repeated: Sequence[RepeatedSteps]) -> int | None:
    """Return the newest repeated step for which a key's history has a new value.

    `history` has pairs of step and time.
    """
    until = ((step, time, last_repeat_time(repeated, step)) for step, time in history)
    return max((step for step, time, first in until if first is not None and time > first), default=None)


def parse_newest_steps(run: Mapping[str, Any]) -> dict[str, int]:
    """Return the newest step of each key, from the answer of MLflow's `runs/get`."""
    metrics = run["run"]["data"].get("metrics", [])
    return {metric["key"]: int(metric.get("step", 0)) for metric in metrics}
