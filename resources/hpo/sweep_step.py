"""Decide a sweep's next step from observations of its trials, as one pure function."""

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from resources.hpo.early_stopping import EarlyStop, TrialHistory, find_stops
from resources.hpo.strategies import suggest_trials
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.trial import ENDED_STATUSES, FINAL_STATUSES, Observation, Point, Trial, rank_trials
from resources.hpo.trial_job import trial_steps

CANCELLED_REASON = "its sweep was cancelled"
NO_MODEL_MESSAGE = "all trials that have a value were stopped early, so that there is no model of any of them"


@dataclass(frozen=True)
class End:
    """How a sweep ends."""

    status: Literal["completed", "failed", "cancelled"]
    reason: str


@dataclass(frozen=True)
class Step:
    """`changed` are existing trials with their new state; `new_trials` are to be started.

    Most steps are empty.
    """

    changed: tuple[Trial, ...] = ()
    new_trials: tuple[Trial, ...] = ()
    end: End | None = None

    def __bool__(self) -> bool:
        return bool(self.changed or self.new_trials or self.end)


def decide_next_step(
    sweep_id: str, config: SweepConfig, trials: Sequence[Trial], observed: Mapping[int, Observation], now: int
) -> Step:
    """Update and stop trials, suggest new ones, and end a complete sweep.

    Args:
        trials: all trials so far, by number from 0.
        observed: the observation of each trial by number; ended trials may be left out.
        now: milliseconds since 1970.
    """
    updated = apply_observations(config, trials, observed, now)
    free = config.max_concurrent_trials - sum(not trial.has_ended for trial in updated)
    new_trials = tuple(
        Trial(
            number=number,
            job_id=trial_job_id(sweep_id, number),
            params=suggestion.params,
            status="running",
            created_at=now,
            generation=suggestion.generation,
            member=suggestion.member,
            start_from=suggestion.start_from,
        )
        for number, suggestion in enumerate(suggest_trials(config, updated, max(free, 0)), start=len(updated))
    )
    changed = tuple(after for before, after in zip(trials, updated, strict=True) if after != before)
    is_over = not new_trials and all(trial.has_ended for trial in updated)
    return Step(changed, new_trials, decide_end(updated, config) if is_over else None)


def decide_cancellation(
    config: SweepConfig, trials: Sequence[Trial], observed: Mapping[int, Observation], now: int, reason: str
) -> Step:
    """Cancel a sweep. Trials whose job has ended keep their outcome, the others are cancelled."""
    both = zip(trials, apply_observations(config, trials, observed, now), strict=True)
    updated = [cancel_trial(after if has_job_ended(before, observed) else before, now) for before, after in both]
    changed = tuple(after for before, after in zip(trials, updated, strict=True) if after != before)
    return Step(changed, end=End("cancelled", reason))


def has_job_ended(trial: Trial, observed: Mapping[int, Observation]) -> bool:
    return trial.number in observed and observed[trial.number].status in ENDED_STATUSES


def cancel_trial(trial: Trial, now: int) -> Trial:
    if trial.has_ended:
        return trial
    return replace(
        trial, status=FINAL_STATUSES.get(trial.status, "cancelled"), reason=trial.reason or CANCELLED_REASON, ended_at=now
    )


def trial_job_id(sweep_id: str, number: int) -> str:
    """Return the id of a trial's job: deterministic, so that no trial gets two jobs."""
    return uuid.uuid5(uuid.UUID(sweep_id), str(number)).hex


def apply_observations(
    config: SweepConfig, trials: Sequence[Trial], observed: Mapping[int, Observation], now: int
) -> list[Trial]:
    """Return all trials, updated from observations of their jobs."""
    stopped = find_stops(dict(trial_histories(config, trials, observed)), config)
    return [
        apply_observation(trial, observed[trial.number], stopped.get(trial.number), config, now)
        if trial.number in observed
        else trial
        for trial in trials
    ]


def apply_observation(
    trial: Trial, observation: Observation, stop: EarlyStop | None, config: SweepConfig, now: int
) -> Trial:
    """Return a trial updated from its job.

    Early stopping applies even if the job has ended meanwhile.
    """
    if trial.has_ended:
        return trial
    if trial.status in FINAL_STATUSES:
        return replace(trial, status=FINAL_STATUSES[trial.status], ended_at=now) if observation.is_stopped else trial
    point = stop.point if stop else observation.points[-1] if observation.points else None
    valued = replace(trial, value=point.value, step=point.step) if point and math.isfinite(point.value) else trial
    if observation.status == "cancelled":
        return replace(valued, status="cancelling", reason=observation.reason)
    if stop is not None:
        stopped = replace(valued, step=stop.point.step, reason=stop.reason)
        if observation.status in ENDED_STATUSES:
            return replace(stopped, status="pruned", ended_at=now)
        return replace(stopped, status="pruning")
    if observation.status == "completed":
        if valued.value is not None:
            return replace(valued, status="completed", ended_at=now)
        return replace(
            trial, status="failed", reason=missing_value_reason(observation.points, config.objective.metric), ended_at=now
        )
    if observation.status == "failed":
        return replace(valued, status="failed", reason=observation.reason, ended_at=now)
    return trial


def missing_value_reason(points: Sequence[Point], metric: str) -> str:
    """Return why a completed run has no value."""
    if points:
        return f"it diverged: the last '{metric}' of its run, at step {points[-1].step}, is no finite number"
    return f"its run logged no '{metric}': see objective.metric, and eval_steps in base_config"


def trial_histories(
    config: SweepConfig, trials: Sequence[Trial], observed: Mapping[int, Observation]
) -> Iterator[tuple[int, TrialHistory]]:
    """Yield the histories that trials are compared with.

    Failed and cancelled ones leave no model and are not included.
    """
    if config.early_stopping is None and config.strategy != "successive_halving":
        return
    for trial in trials:
        if trial.number not in observed or trial.status in ("failed", "cancelling", "cancelled"):
            continue
        observation = observed[trial.number]
        if trial.status == "running" and observation.status != "cancelled":
            yield (
                trial.number,
                TrialHistory(
                    observation.points, True, observation.status != "failed", final_step(config, trial, observation)
                ),
            )
        elif trial.status == "completed":
            yield trial.number, TrialHistory(observation.points, may_stop=False)
        elif trial.status in ("pruning", "pruned"):
            reached = [point for point in observation.points if trial.step is None or point.step <= trial.step]
            yield trial.number, TrialHistory(reached, may_stop=False)


def final_step(config: SweepConfig, trial: Trial, observation: Observation) -> int | None:
    """Return the last step of a trial.

    After that step, it only publishes its model, which may be the best.
    """
    steps = trial_steps(config, trial.params, trial.generation)
    if steps is None and observation.status == "completed" and observation.points:
        return observation.points[-1].step
    return steps


def decide_end(trials: Sequence[Trial], config: SweepConfig) -> End:
    if best := rank_trials(trials, config.objective.direction):
        return End("completed", missing_model_hint(best))
    reasons = [trial.reason for trial in trials if trial.reason]
    return End(
        "failed", f"no trial has a value of '{config.objective.metric}'; the last one: {reasons[-1] if reasons else ''}"
    )


def missing_model_hint(best: Sequence[Trial]) -> str:
    """Return a hint for the user if the best trial was stopped early."""
    first = best[0]
    if first.status == "completed":
        return ""
    message = f"trial {first.number} is the best, and was stopped early"
    if not any(trial.status == "completed" for trial in best):
        message = f"{NO_MODEL_MESSAGE}; trial {first.number} is the best"
    return f"{message}: `hanzo-ml job resume {first.job_id}` trains it to its end, and evaluates and registers it"
