"""Our experiments and runs as MLflow's JSON messages. Unset fields are left out, as in protobuf's JSON."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Response

from api.mlflow.statuses import TO_MLFLOW
from resources.errors import HanzoError, invalid
from resources.metadata.experiments import Experiment
from resources.metadata.inputs import DatasetInput
from resources.metadata.logged_runs import LoggedRun
from resources.metadata.run_states import Run
from resources.metadata.tracking_rules import MetricPoint, printable

VIEWS = {"ACTIVE_ONLY": ("active",), "DELETED_ONLY": ("deleted",), "ALL": ("active", "deleted")}


def answer(**fields: Any) -> Response:
    content = msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
    return Response(content, media_type="application/json")


def experiment_number(text: str) -> int:
    """MLflow's experiment ids are strings; those of a database are numbers."""
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise bad_experiment_id(text)
    return int(text)


def bad_experiment_id(text: str) -> HanzoError:
    return invalid(f"Invalid experiment ID '{printable(text)}'. Experiment ID must be a valid integer.")


def experiment_message(experiment: Experiment) -> dict[str, Any]:
    return {
        "experiment_id": str(experiment.id),
        "name": experiment.name,
        "artifact_location": experiment.artifact_location,
        "lifecycle_stage": experiment.lifecycle_stage,
        "creation_time": experiment.creation_time,
        "last_update_time": experiment.last_update_time,
        "tags": pairs(experiment.tags),
    }


def info_message(run: Run) -> dict[str, Any]:
    fields = {
        "run_id": run.id,
        "run_uuid": run.id,
        "run_name": run.name,
        "experiment_id": str(run.experiment_id),
        "user_id": run.user_id,
        "status": TO_MLFLOW[run.status],
        "start_time": run.start_time,
        "end_time": run.end_time,
        "artifact_uri": run.artifact_uri,
        "lifecycle_stage": run.lifecycle_stage,
    }
    return {name: value for name, value in fields.items() if value is not None}


def run_message(logged: LoggedRun) -> dict[str, Any]:
    return {
        "info": info_message(logged.run),
        "data": {
            "metrics": [metric_message(point) for point in logged.metrics],
            "params": pairs(logged.params),
            "tags": pairs(logged.tags),
        },
        "inputs": filled(
            dataset_inputs=[input_message(used) for used in logged.inputs],
            model_inputs=[{"model_id": model.model_id} for model in logged.models if model.direction == "input"],
        ),
        "outputs": filled(
            model_outputs=[
                {"model_id": model.model_id, "step": model.step} for model in logged.models if model.direction == "output"
            ],
        ),
    }


def input_message(used: DatasetInput) -> dict[str, Any]:
    fields = {name: value for name, value in vars(used.dataset).items() if value is not None}
    return {"tags": pairs(used.tags), "dataset": fields}


def filled(**lists: list[Any]) -> dict[str, list[Any]]:
    return {name: values for name, values in lists.items() if values}


def metric_message(point: MetricPoint) -> dict[str, Any]:
    """JSON has no NaN: it travels as a string."""
    value = "NaN" if point.is_nan else point.value
    return {"key": point.key, "value": value, "timestamp": point.timestamp, "step": point.step}


def pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]
