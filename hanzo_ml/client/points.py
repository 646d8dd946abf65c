"""Metric points, their retries, and steps that a resumed run repeats."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

UNKNOWN_TIME = 2**63 - 1
"""In the place of the time that an earlier release did not write down."""


@dataclass(frozen=True)
class RepeatedSteps:
    """What was logged of `steps` up to `since`, in ms since 1970, is of the first time, and what came later is not."""

    steps: range
    since: int

    @classmethod
    def from_time(cls, steps: range, rewound_at: int | None) -> Self:
        """Of steps that were done once more from that time on, in ms since 1970; None where it was not written down."""
        return cls(steps, UNKNOWN_TIME if rewound_at is None else rewound_at)


def last_repeat_time(repeated: Iterable[RepeatedSteps], step: int) -> int | None:
    """Up to when (ms since 1970) values of `step` are of a time before the newest; None where it is done once."""
    return max((each.since for each in repeated if step in each.steps), default=None)


MAX_METRICS_PER_REQUEST = 1000
"""MLflow's limit of metrics in one request."""
FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 10.0
REFUSAL_CODES = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST")


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


def retry_delay(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 20))


def is_refusal(status: int, error_code: str) -> bool:
    """Whether sending the same again cannot help. Anything else (a proxy, an expired token, a restart) may pass."""
    return status in (400, 409, 413, 422) or (status == 404 and error_code in REFUSAL_CODES)
