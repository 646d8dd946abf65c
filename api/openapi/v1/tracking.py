"""Experiments and runs (rows E1-E5, E11)."""

from typing import Literal

from api.schemas.mlflow.responses import Message, PointMessage, State

Status = Literal["queued", "running", "completed", "failed", "cancelled"]
Value = float | Literal["NaN"]


class Experiment(Message):
    """`gpu_hours` are those of all its runs."""

    id: str
    experiment_id: str
    name: str
    description: str
    owner: str
    organization: str
    lifecycle_stage: State
    created_at: int
    updated_at: int
    gpu_hours: float
    tags: dict[str, str]


class Experiments(Message):
    experiments: list[Experiment]
    next_page_token: str | None


class SystemMetrics(Message):
    """What the training container measured; null where nothing was logged."""

    gpu_type: str | None
    gpu_count: float | None
    total_gpu_hours: float | None
    peak_memory_gb: float | None
    total_tokens_processed: float | None


class Run(Message):
    """With the newest value of every metric."""

    id: str
    experiment_id: str
    name: str
    status: Status
    start_time: int | None
    end_time: int | None
    started_at: int | None
    ended_at: int | None
    user_id: str
    organization: str
    artifact_uri: str
    git_commit: str | None
    lifecycle_stage: State
    params: dict[str, str]
    tags: dict[str, str]
    metrics: list[PointMessage]
    system_metrics: SystemMetrics


class Runs(Message):
    runs: list[Run]
    next_page_token: str | None


class RunArtifact(Message):
    key: str
    path: str
    size: int


class RunWithArtifacts(Run):
    artifacts: list[RunArtifact]


class StoredArtifact(RunArtifact):
    """What was uploaded, as it was stored."""

    sha256: str


class ComparedRun(Message):
    id: str
    name: str
    experiment_id: str
    status: Status
    start_time: int | None
    end_time: int | None
    git_commit: str | None
    params: dict[str, str]
    duration_seconds: float | None
    gpu_hours: float | None
    metrics: dict[str, Value]


class Differences(Message):
    """By key the values of all runs, in their order, where they are not the same; null where a run has none."""

    params: dict[str, list[str | None]]
    metrics: dict[str, list[Value | None]]


class Comparison(Message):
    runs: list[ComparedRun]
    differences: Differences
