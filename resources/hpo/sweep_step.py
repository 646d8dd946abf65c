"""What a sweep does next, from what is seen of its trials: the whole ask/tell loop as one pure function."""

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from resources.hpo.early_stopping import Course, Stop, stops
from resources.hpo.suggestions import suggestions
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.trial import ENDED, ENDS_AS, Observation, Point, Trial, ranked
from resources.hpo.trial_job import steps_of

CANCELLED = "its sweep was cancelled"
NO_MODEL = "all trials that have a value were stopped early, so that there is no model of any of them"


@dataclass(frozen=True)
class End:
    """How a sweep ends."""

    status: Literal["completed", "failed", "cancelled"]
    reason: str


@dataclass(frozen=True)
class Step:
    """`changed` are trials as they are now; `asked` are new ones. Nothing at all is the usual step."""

    changed: tuple[Trial, ...] = ()
    asked: tuple[Trial, ...] = ()
    end: End | None = None

    def __bool__(self) -> bool:
        return bool(self.changed or self.asked or self.end)


def next_step(
    sweep_id: str, config: SweepConfig, trials: Sequence[Trial], observed: Mapping[int, Observation], now: int
) -> Step:
    """Tell, stop, ask, end.

    Args:
        trials: all trials so far, by number from 0.
        observed: what is seen of each trial, by its number; one that has ended may be left out.
        now: milliseconds.
    """
    told = all_seen(config, trials, observed, now)
    free = config.max_concurrent_trials - sum(not trial.has_ended for trial in told)
    asked = tuple(
        Trial(
            number=number,
            job_id=job_id_of(sweep_id, number),
            params=suggestion.params,
            status="running",
            created_at=now,
            generation=suggestion.generation,
            member=suggestion.member,
            start_from=suggestion.start_from,
        )
        for number, suggestion in enumerate(suggestions(config, told, max(free, 0)), start=len(told))
    )
    changed = tuple(after for before, after in zip(trials, told, strict=True) if after != before)
    is_over = not asked and all(trial.has_ended for trial in told)
    return Step(changed, asked, end_of(told, config) if is_over else None)


def cancelled_step(
    config: SweepConfig, trials: Sequence[Trial], observed: Mapping[int, Observation], now: int, reason: str
) -> Step:
    """The end of a sweep before its time. A trial whose job has ended by then ends as it did, the others are cancelled."""
    both = zip(trials, all_seen(config, trials, observed, now), strict=True)
    told = [cut_short(after if is_done(before, observed) else before, now) for before, after in both]
    changed = tuple(after for before, after in zip(trials, told, strict=True) if after != before)
    return Step(changed, end=End("cancelled", reason))


def is_done(trial: Trial, observed: Mapping[int, Observation]) -> bool:
    return trial.number in observed and observed[trial.number].status in ENDED


def cut_short(trial: Trial, now: int) -> Trial:
    if trial.has_ended:
        return trial
    return replace(trial, status=ENDS_AS.get(trial.status, "cancelled"), reason=trial.reason or CANCELLED, ended_at=now)


def job_id_of(sweep_id: str, number: int) -> str:
    """The job of a trial: one id for one trial, so that no trial has two jobs."""
    return uuid.uuid5(uuid.UUID(sweep_id), str(number)).hex


def all_seen(config: SweepConfig, trials: Sequence[Trial], observed: Mapping[int, Observation], now: int) -> list[Trial]:
    """All trials after a look at their jobs."""
    stopped = stops(dict(courses(config, trials, observed)), config)
    return [
        seen(trial, observed[trial.number], stopped.get(trial.number), config, now) if trial.number in observed else trial
        for trial in trials
    ]


def seen(trial: Trial, look: Observation, stop: Stop | None, config: SweepConfig, now: int) -> Trial:
    """A trial after a look at its job. One that is to be stopped was so then, also where its job has ended since."""
    if trial.has_ended:
        return trial
    if trial.status in ENDS_AS:
        return replace(trial, status=ENDS_AS[trial.status], ended_at=now) if look.is_gone else trial
    point = stop.point if stop else look.points[-1] if look.points else None
    valued = replace(trial, value=point.value, step=point.step) if point and math.isfinite(point.value) else trial
    if look.status == "cancelled":
        return replace(valued, status="cancelling", reason=look.reason)
    if stop is not None:
        stopped = replace(valued, step=stop.point.step, reason=stop.reason)
        if look.status in ENDED:
            return replace(stopped, status="pruned", ended_at=now)
        return replace(stopped, status="pruning")
    if look.status == "completed":
        if valued.value is not None:
            return replace(valued, status="completed", ended_at=now)
        return replace(trial, status="failed", reason=without_value(look.points, config.objective.metric), ended_at=now)
    if look.status == "failed":
        return replace(valued, status="failed", reason=look.reason, ended_at=now)
    return trial


def without_value(points: Sequence[Point], metric: str) -> str:
    """Why a run that ended well has no value."""
    if points:
        return f"it diverged: the last '{metric}' of its run, at step {points[-1].step}, is no finite number"
    return f"its run logged no '{metric}': see objective.metric, and eval_steps in base_config"


def courses(
    config: SweepConfig, trials: Sequence[Trial], observed: Mapping[int, Observation]
) -> Iterator[tuple[int, Course]]:
    """Those by which trials are judged. Not of those that failed or were cancelled, which leave no model."""
    if config.early_stopping is None and config.strategy != "successive_halving":
        return
    for trial in trials:
        if trial.number not in observed or trial.status in ("failed", "cancelling", "cancelled"):
            continue
        look = observed[trial.number]
        if trial.status == "running" and look.status != "cancelled":
            yield trial.number, Course(look.points, True, look.status != "failed", last_step(config, trial, look))
        elif trial.status == "completed":
            yield trial.number, Course(look.points, may_stop=False)
        elif trial.status in ("pruning", "pruned"):
            reached = [point for point in look.points if trial.step is None or point.step <= trial.step]
            yield trial.number, Course(reached, may_stop=False)


def last_step(config: SweepConfig, trial: Trial, look: Observation) -> int | None:
    """How long a trial trains: at that step it has done all, and only publishes what may be the best of all models."""
    steps = steps_of(config, trial.params, trial.generation)
    if steps is None and look.status == "completed" and look.points:
        return look.points[-1].step
    return steps


def end_of(trials: Sequence[Trial], config: SweepConfig) -> End:
    if best := ranked(trials, config.objective.direction):
        return End("completed", without_model(best))
    reasons = [trial.reason for trial in trials if trial.reason]
    return End(
        "failed", f"no trial has a value of '{config.objective.metric}'; the last one: {reasons[-1] if reasons else ''}"
    )


def without_model(best: Sequence[Trial]) -> str:
    """What to do about the best trial where that was stopped early; nothing where it was not."""
    first = best[0]
    if first.status == "completed":
        return ""
    what = f"trial {first.number} is the best, and was stopped early"
    if not any(trial.status == "completed" for trial in best):
        what = f"{NO_MODEL}; trial {first.number} is the best"
    return f"{what}: `hanzo-ml job resume {first.job_id}` trains it to its end, and evaluates and registers it"
