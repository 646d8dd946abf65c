"""A trial of a sweep, what is seen of it, and which is the best. Plain data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from resources.hpo.search_space import Params

Status = Literal["running", "pruning", "cancelling", "completed", "pruned", "failed", "cancelled"]
FINAL_STATUSES: dict[Status, Status] = {"pruning": "pruned", "cancelling": "cancelled"}
"""A trial that was told to stop keeps its place until its processes are gone."""
ENDED_STATUSES = frozenset({"completed", "pruned", "failed", "cancelled"})


@dataclass(frozen=True)
class Trial:
    """One set of hyperparameters and the job that tries it; times in milliseconds.

    `value` is the objective's last value at `step`; of a trial that was stopped early, the last before it was. Of a
    population: `member` of `generation`, which starts from the weights of trial number `start_from`.
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
        """Whether its value says something: it ended well, or was stopped early."""
        return self.status in ("completed", "pruned") and self.value is not None


@dataclass(frozen=True)
class Suggestion:
    """What to try next."""

    params: Params
    generation: int = 0
    member: int = 0
    start_from: int | None = None


@dataclass(frozen=True)
class Point:
    """A logged value of the objective, which may be no finite number; `time` in milliseconds, by the clock of its trial."""

    step: int
    value: float
    time: int = 0


@dataclass(frozen=True)
class Observation:
    """A trial's job as it stands. `is_stopped`: nothing of it runs any more."""

    status: str
    reason: str = ""
    points: tuple[Point, ...] = ()
    is_stopped: bool = True


def cost(value: float, direction: str) -> float:
    """The less the better, in either direction. What is no finite number is worst: a trial that diverged to where more is
    better was kept for the best of all, and no other went on beside it.
    """
    if not math.isfinite(value):
        return math.inf
    return value if direction == "minimize" else -value


def rank_trials(trials: Sequence[Trial], direction: str) -> list[Trial]:
    """The trials that count, best first; of equal ones the earlier."""
    counting = [
        (cost(trial.value, direction), trial.number, trial)
        for trial in trials
        if trial.has_result and trial.value is not None
    ]
    return [trial for *_, trial in sorted(counting, key=lambda each: each[:2])]
