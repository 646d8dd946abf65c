"""Experiments, runs and comparisons as JSON of /v1. Times are milliseconds since 1970 UTC."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from typing_extensions import TypedDict

from api.schemas.mlflow.messages import metric_message
from api.schemas.mlflow.responses import PointMessage, State
from resources.metadata.field_rules import COMMIT_TAG
from resources.metadata.tracking.experiments import Experiment as ExperimentRecord
from resources.metadata.tracking.logged_runs import LoggedRun

Status = Literal["queued", "running", "completed", "failed", "cancelled"]
MetricValue = float | Literal["NaN"]


class Experiment(TypedDict):
    """`gpu_hours` is the sum over all its runs."""

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


class Experiments(TypedDict):
    experiments: list[Experiment]
    next_page_token: str | None


class SystemMetrics(TypedDict):
    """Measurements of the training container; null if not logged."""

    gpu_type: str | None
    gpu_count: float | None
    total_gpu_hours: float | None
    peak_memory_gb: float | None
    total_tokens_processed: float | None


class Run(TypedDict):
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


class Runs(TypedDict):
    runs: list[Run]
    next_page_token: str | None


class RunArtifact(TypedDict):
    key: str
    path: str
    size: int


class RunWithArtifacts(Run):
    artifacts: list[RunArtifact]


class StoredArtifact(RunArtifact):
    """The uploaded file, as it was stored."""

    sha256: str


class ComparedRun(TypedDict):
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
    metrics: dict[str, MetricValue]


class Differences(TypedDict):
    """Values of all runs, in order, by key, where they differ; null if missing."""

    params: dict[str, list[str | None]]
    metrics: dict[str, list[MetricValue | None]]


class Comparison(TypedDict):
    runs: list[ComparedRun]
    differences: Differences


DESCRIPTION_TAG = "mlflow.note.content"
OWNER_TAG = "owner"


def experiment_json(experiment: ExperimentRecord, gpu_hours: float) -> Experiment:
    """Convert an experiment to JSON; `gpu_hours` is the sum over all its runs."""
    return {
        "id": str(experiment.id),
        "experiment_id": str(experiment.id),
        "name": experiment.name,
        "description": experiment.tags.get(DESCRIPTION_TAG, ""),
        "owner": experiment.tags.get(OWNER_TAG, ""),
        "organization": experiment.organization,
        "lifecycle_stage": cast(State, experiment.lifecycle_stage),
        "created_at": experiment.creation_time,
        "updated_at": experiment.last_update_time,
        "gpu_hours": gpu_hours,
        "tags": dict(experiment.tags),
    }


def run_json(logged: LoggedRun) -> Run:
    """Convert a run to JSON with the newest value of every metric (series: `metrics/get-history`)."""
    run = logged.run
    return {
        "id": run.id,
        "experiment_id": str(run.experiment_id),
        "name": run.name,
        "status": cast(Status, run.status),
        "start_time": run.start_time,
        "end_time": run.end_time,
        "started_at": run.start_time,
        "ended_at": run.end_time,
        "user_id": run.user_id,
        "organization": run.organization,
        "artifact_uri": run.artifact_uri,
        "git_commit": logged.tags.get(COMMIT_TAG),
        "lifecycle_stage": cast(State, run.lifecycle_stage),
        "params": dict(logged.params),
        "tags": dict(logged.tags),
        "metrics": [metric_message(point) for point in logged.metrics],
        "system_metrics": system_metrics(logged),
    }


def system_metrics(logged: LoggedRun) -> SystemMetrics:
    """Return the metrics `system/...` and the tag `system/gpu_type`; null if not logged."""
    numbers = {point.key: None if point.is_nan else point.value for point in logged.metrics}
    return {
        "gpu_type": logged.tags.get("system/gpu_type"),
        "gpu_count": numbers.get("system/gpu_count"),
        "total_gpu_hours": numbers.get("system/total_gpu_hours"),
        "peak_memory_gb": numbers.get("system/peak_memory_gb"),
        "total_tokens_processed": numbers.get("system/total_tokens_processed"),
    }


def comparison(found: Sequence[LoggedRun]) -> Comparison:
    """Compare runs: the runs in order, and the params and metrics in which they differ."""
    runs = [compared_run(logged) for logged in found]
    return {
        "runs": runs,
        "differences": {
            "params": differing([run["params"] for run in runs]),
            "metrics": differing([run["metrics"] for run in runs]),
        },
    }


def compared_run(logged: LoggedRun) -> ComparedRun:
    run, document = logged.run, run_json(logged)
    return {
        "id": document["id"],
        "name": document["name"],
        "experiment_id": document["experiment_id"],
        "status": document["status"],
        "start_time": document["start_time"],
        "end_time": document["end_time"],
        "git_commit": document["git_commit"],
        "params": document["params"],
        "duration_seconds": None
        if run.start_time is None or run.end_time is None
        else (run.end_time - run.start_time) / 1000,
        "gpu_hours": document["system_metrics"]["total_gpu_hours"],
        "metrics": {point["key"]: point["value"] for point in document["metrics"]},
    }


def differing(run_values: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of all runs by key, where they differ."""
    keys = sorted(set().union(*run_values))
    rows = {key: [values.get(key) for values in run_values] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}
