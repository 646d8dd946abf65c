"""Our experiments and runs as the specification's JSON (rows E1-E5, E11). Times are milliseconds since 1970 UTC."""

from collections.abc import Mapping, Sequence
from typing import Any

from api.schemas.mlflow.messages import metric_message
from resources.metadata.tracking.experiments import Experiment
from resources.metadata.tracking.logged_runs import LoggedRun
from resources.metadata.tracking.run_data import COMMIT_TAG

DESCRIPTION_TAG = "mlflow.note.content"
OWNER_TAG = "owner"
SYSTEM = "system/"
"""Prefix under which the training container logs what it measured of the machine."""
SYSTEM_NUMBERS = ("gpu_count", "total_gpu_hours", "peak_memory_gb", "total_tokens_processed")


def experiment_json(experiment: Experiment, gpu_hours: float) -> dict[str, Any]:
    """`gpu_hours` are those of all its runs (row E10)."""
    return {
        "id": str(experiment.id),
        "experiment_id": str(experiment.id),
        "name": experiment.name,
        "description": experiment.tags.get(DESCRIPTION_TAG, ""),
        "owner": experiment.tags.get(OWNER_TAG, ""),
        "organization": experiment.organization,
        "lifecycle_stage": experiment.lifecycle_stage,
        "created_at": experiment.creation_time,
        "updated_at": experiment.last_update_time,
        "gpu_hours": gpu_hours,
        "tags": dict(experiment.tags),
    }


def run_json(logged: LoggedRun) -> dict[str, Any]:
    """A run with the newest value of every metric; the whole series is `metrics/get-history`."""
    run = logged.run
    return {
        "id": run.id,
        "experiment_id": str(run.experiment_id),
        "name": run.name,
        "status": run.status,
        "start_time": run.start_time,
        "end_time": run.end_time,
        "started_at": run.start_time,
        "ended_at": run.end_time,
        "user_id": run.user_id,
        "organization": run.organization,
        "artifact_uri": run.artifact_uri,
        "git_commit": logged.tags.get(COMMIT_TAG),
        "lifecycle_stage": run.lifecycle_stage,
        "params": dict(logged.params),
        "tags": dict(logged.tags),
        "metrics": [metric_message(point) for point in logged.metrics],
        "system_metrics": system_metrics(logged),
    }


def system_metrics(logged: LoggedRun) -> dict[str, Any]:
    """Row E5: the metrics `system/...` and the tag `system/gpu_type`; null where nothing was logged."""
    numbers = {point.key: None if point.is_nan else point.value for point in logged.metrics}
    return {
        "gpu_type": logged.tags.get(SYSTEM + "gpu_type"),
        **{name: numbers.get(SYSTEM + name) for name in SYSTEM_NUMBERS},
    }


SHOWN = ("id", "name", "experiment_id", "status", "start_time", "end_time", "git_commit", "params")


def comparison(found: Sequence[LoggedRun]) -> dict[str, Any]:
    """The runs in their order; and by key the values of all, where they are not the same: null where a run has none."""
    runs = [side(logged) for logged in found]
    return {"runs": runs, "differences": {kind: differing([run[kind] for run in runs]) for kind in ("params", "metrics")}}


def side(logged: LoggedRun) -> dict[str, Any]:
    run, document = logged.run, run_json(logged)
    return {
        **{name: document[name] for name in SHOWN},
        "duration_seconds": None
        if run.start_time is None or run.end_time is None
        else (run.end_time - run.start_time) / 1000,
        "gpu_hours": document["system_metrics"]["total_gpu_hours"],
        "metrics": {point["key"]: point["value"] for point in document["metrics"]},
    }


def differing(sides: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    rows = {key: [side.get(key) for side in sides] for key in sorted(set().union(*sides))}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}
