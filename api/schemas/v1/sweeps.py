"""Sweeps and their trials as JSON."""

from dataclasses import asdict
from typing import Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from resources.hpo.search_space import Value
from resources.hpo.sweep_config import Objective, SweepConfig
from resources.hpo.sweep_rows import JobState, Snapshot
from resources.hpo.trial import Trial as TrialRecord
from resources.hpo.trial import rank_trials

Strategy = Literal["grid", "random", "bayesian", "pbt", "successive_halving"]
TrialStatus = Literal["queued", "running", "pruning", "cancelling", "completed", "pruned", "failed", "cancelled"]


class Trial(TypedDict):
    """`value` is the objective's last value, at `step`; `job_id` and `run_id` are its job."""

    number: int
    job_id: str
    params: dict[str, Value]
    status: TrialStatus
    created_at: int
    value: float | None
    step: int | None
    generation: int
    member: int
    start_from: int | None
    reason: str
    ended_at: int | None
    run_id: str


class Trials(TypedDict):
    trials: list[Trial]
    next_page_token: NotRequired[str]


class Sweep(TypedDict):
    """`trials` counts trials by status; `best_trial` is null until one has a value."""

    id: str
    run_id: str
    experiment: str
    status: Literal["running", "completed", "failed", "cancelled"]
    reason: str
    strategy: Strategy
    objective: Objective
    user_id: str
    organization: str
    created_at: int
    ended_at: int | None
    max_trials: int
    max_concurrent_trials: int
    trials: dict[TrialStatus, int]
    best_trial: Trial | None
    config: SweepConfig


class Sweeps(TypedDict):
    sweeps: list[Sweep]
    next_page_token: NotRequired[str]


def sweep_json(snapshot: Snapshot) -> Sweep:
    sweep, trials = snapshot.sweep, list(map(trial_json, snapshot.trials, snapshot.jobs))
    best = next(iter(rank_trials(snapshot.trials, sweep.config.objective.direction)), None)
    counts: dict[TrialStatus, int] = {}
    for trial in trials:
        counts[trial["status"]] = counts.get(trial["status"], 0) + 1
    return {
        "id": sweep.id,
        "run_id": sweep.id,
        "experiment": sweep.experiment,
        "status": cast(Any, sweep.status),
        "reason": sweep.reason,
        "strategy": sweep.config.strategy,
        "objective": sweep.config.objective,
        "user_id": sweep.user_id,
        "organization": sweep.organization,
        "created_at": sweep.created_at,
        "ended_at": sweep.ended_at,
        "max_trials": sweep.config.wanted_trials,
        "max_concurrent_trials": sweep.config.max_concurrent_trials,
        "trials": counts,
        "best_trial": trials[best.number] if best else None,
        "config": sweep.config,
    }


def trial_json(trial: TrialRecord, job: JobState) -> Trial:
    """Convert a trial to JSON; one whose job still waits is queued."""
    status, reason = job
    return cast(
        Trial,
        {
            **asdict(trial),
            "params": dict(trial.params),
            "run_id": trial.job_id,
            "status": "queued" if trial.status == "running" and status == "queued" else trial.status,
            "reason": trial.reason or reason,
        },
    )
