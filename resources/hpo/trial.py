"""A trial of a sweep, observations of it, and the ranking of trials. Plain data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from resources.hpo.search_space import Params

Status = Literal["running", "pruning", "cancelling", "completed", "pruned", "failed", "cancelled"]
FINAL_STATUSES: dict[Status, Status] = {"pruning": "pruned", "cancelling": "cancelled"}
"""A trial that is to stop occupies its slot until its processes are gone."""
ENDED_STATUSES = frozenset({"completed", "pruned", "failed", "cancelled"})


@dataclass(frozen=True)
class Trial:
    """One set of hyperparameters and the job that trains with it.

    Times in milliseconds since 1970. `value` is the objective's last value, at `step`; if the trial was stopped early, the
    last one before that. In a population: `member` of `generation`, which starts from the weights of trial number
    `start_from`.
    """

    number: int
    job_id: str
    params: Params
    status: Status
    created_at: int
    value: float | None = None
    step: int | None = None
    generation: int = 0
    member: int = 0
    start_from: int | None = None
    reason: str = ""
    ended_at: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED_STATUSES

    @property
    def has_result(self) -> bool:
        """Whether its value counts: it completed, or was stopped early."""
        return self.status in ("completed", "pruned") and self.value is not None


@dataclass(frozen=True)
class Suggestion:
    """The params of a trial to start."""

    params: Params
    generation: int = 0
    member: int = 0
    start_from: int | None = None


@dataclass(frozen=True)
class Point:
    """A logged value of the objective, which may not be finite.

    `time` in milliseconds, by the clock of its trial.
    """

    step: int
    value: float
    time: int = 0


@dataclass(frozen=True)
class Observation:
    """The state of a trial's job.

    `is_stopped` means that none of its processes run any more.
    """

    status: str
    reason: str = ""
    points: tuple[Point, ...] = ()
    is_stopped: bool = True


def cost(value: float, direction: str) -> float:
    """Return a value's cost: less is better, in either direction.

    A value that is not finite is worst. When maximizing, a trial that diverged to infinity was once kept as the best of all,
    and no other trial continued next to it.
    """
    if not math.isfinite(value):
        return math.inf
    return value if direction == "minimize" else -value


def rank_trials(trials: Sequence[Trial], direction: str) -> list[Trial]:
    """Return the trials with a result, best first; the earlier of equal ones first."""
    counting = [
        (cost(trial.value, direction), trial.number, trial)
        for trial in trials
        if trial.has_result and trial.value is not None
    ]
    return [trial for *_, trial in sorted(counting, key=lambda each: each[:2])]
