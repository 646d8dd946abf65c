"""Sweeps and their trials (rows K1, K2)."""

from typing import Any, Literal

from api.schemas.mlflow.responses import Message

Scalar = bool | int | float | str
Value = Scalar | list[Scalar] | None
Strategy = Literal["grid", "random", "bayesian", "pbt", "successive_halving"]
TrialStatus = Literal["queued", "running", "pruning", "cancelling", "completed", "pruned", "failed", "cancelled"]


class SearchedUniform(Message, tag_field="type", tag="uniform"):
    min: float
    max: float
    points: int | None


class SearchedLogUniform(SearchedUniform, tag_field="type", tag="log_uniform"):
    """Equal ratios instead of equal distances."""


class SearchedChoice(Message, tag_field="type", tag="choice"):
    values: list[Value]


class SweepObjective(Message):
    metric: str
    direction: Literal["minimize", "maximize"]


class SweepEarlyStopping(Message):
    patience: int
    min_delta: float


class TrialResources(Message):
    gpus: int
    gpu_type: str | None
    memory: str | None
    cpu: int | None


class SweepHalving(Message):
    reduction_factor: int
    min_steps: int | None


class SweepPopulation(Message):
    population: int | None
    generations: int | None


class SweepConfiguration(Message):
    """As it was asked for, with what the server chose where nothing was said."""

    experiment: str
    base_config: dict[str, Any]
    search_space: dict[str, SearchedUniform | SearchedLogUniform | SearchedChoice]
    strategy: Strategy
    sampler: Literal["tpe", "gp"]
    objective: SweepObjective
    max_trials: int
    max_concurrent_trials: int
    early_stopping: SweepEarlyStopping | None
    resources_per_trial: TrialResources | None
    successive_halving: SweepHalving
    pbt: SweepPopulation
    seed: int


class Trial(Message):
    """`value` is the objective's last value at `step`, `job_id` and `run_id` the job that tries it."""

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


class Trials(Message):
    trials: list[Trial]
    next_page_token: str = ""


class Sweep(Message):
    """`trials` counts those of each status; `best_trial` is null while none has a value."""

    id: str
    run_id: str
    experiment: str
    status: Literal["running", "completed", "failed", "cancelled"]
    reason: str
    strategy: Strategy
    objective: SweepObjective
    user_id: str
    organization: str
    created_at: int
    ended_at: int | None
    max_trials: int
    max_concurrent_trials: int
    trials: dict[TrialStatus, int]
    best_trial: Trial | None
    config: SweepConfiguration


class Sweeps(Message):
    sweeps: list[Sweep]
    next_page_token: str = ""
