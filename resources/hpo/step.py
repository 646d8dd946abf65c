"""What a sweep does next, from what is seen of its trials: the whole ask/tell loop as one pure function."""

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from resources.hpo.config import SweepConfig
from resources.hpo.stopping import reason_to_stop
from resources.hpo.suggest import suggestions
from resources.hpo.trial import ENDED, ENDS_AS, Observation, Point, Trial, ranked
from resources.hpo.trial_job import steps_of

CANCELLED = "its sweep was cancelled"
NO_MODEL = "all trials that have a value were stopped early: there is no model of any of them"


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
    told = [seen(trial, trials, observed, config, now) for trial in trials]
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
    told = [
        cut_short(seen(trial, trials, observed, config, now) if is_done(trial, observed) else trial, now) for trial in trials
    ]
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


def seen(trial: Trial, trials: Sequence[Trial], observed: Mapping[int, Observation], config: SweepConfig, now: int) -> Trial:
    """A trial after a look at its job, beside all `trials`."""
    if trial.has_ended or trial.number not in observed:
        return trial
    look = observed[trial.number]
    if trial.status in ENDS_AS:
        return replace(trial, status=ENDS_AS[trial.status], ended_at=now) if look.is_gone else trial
    last = look.points[-1] if look.points else None
    valued = replace(trial, value=last.value, step=last.step) if last and math.isfinite(last.value) else trial
    if look.status == "completed":
        if valued.value is not None:
            return replace(valued, status="completed", ended_at=now)
        why = f"its run logged no finite '{config.objective.metric}': see objective.metric, and eval_steps in base_config"
        return replace(trial, status="failed", reason=why, ended_at=now)
    if look.status == "failed":
        return replace(valued, status="failed", reason=look.reason, ended_at=now)
    if look.status == "cancelled":
        return replace(valued, status="cancelling", reason=look.reason)
    reason = reason_to_stop(look.points, rivals(trial, trials, observed), config)
    if reason and not has_done_all(trial, look.points, config):
        return replace(valued, status="pruning", reason=reason)
    return trial


def rivals(trial: Trial, trials: Sequence[Trial], observed: Mapping[int, Observation]) -> list[Sequence[Point]]:
    """The objectives of the others that it is judged by. Whoever failed, or was cancelled, leaves no model, and so must not
    be what all others are stopped for.
    """
    others = [(other, observed[other.number]) for other in trials if other is not trial and other.number in observed]
    return [look.points for other, look in others if not leaves_nothing(other, look)]


def leaves_nothing(trial: Trial, look: Observation) -> bool:
    if trial.status == "running":
        return look.status in ("failed", "cancelled")
    return trial.status in ("failed", "cancelling", "cancelled")


def has_done_all(trial: Trial, points: Sequence[Point], config: SweepConfig) -> bool:
    """Whether it has trained and only publishes its weights: to stop it then saves nothing, and there would be no model of
    what may be the best trial.
    """
    steps = steps_of(config, trial.params, trial.generation)
    return steps is not None and bool(points) and points[-1].step >= steps


def end_of(trials: Sequence[Trial], config: SweepConfig) -> End:
    if best := ranked(trials, config.objective.direction):
        trained = any(trial.status == "completed" for trial in best)
        return End("completed", "" if trained else NO_MODEL)
    reasons = [trial.reason for trial in trials if trial.reason]
    return End(
        "failed", f"no trial has a value of '{config.objective.metric}'; the last one: {reasons[-1] if reasons else ''}"
    )
