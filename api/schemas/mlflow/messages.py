"""Our experiments as MLflow's JSON messages, and what all messages share. Unset fields are left out, as protobuf does."""

from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from api.responses import TypedResponse
from api.schemas.mlflow.responses import ExperimentMessage, PairMessage, PointMessage, State
from resources.errors import HanzoError, invalid
from resources.metadata.field_rules import MAX_INT64, MetricPoint, printable
from resources.metadata.tracking.experiments import Experiment

VIEWS = {"ACTIVE_ONLY": ("active",), "DELETED_ONLY": ("deleted",), "ALL": ("active", "deleted")}


def mlflow_response(**fields: Any) -> TypedResponse[Any]:
    return TypedResponse(msgspec.json.encode({name: value for name, value in fields.items() if value is not None}))


def experiment_number(text: str) -> int:
    """MLflow's experiment ids are strings; those of a database are numbers. A negative one is a number that nobody has."""
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 20:
        raise bad_experiment_id(text)
    number = int(text)
    if abs(number) > MAX_INT64:
        raise bad_experiment_id(text)
    return number


def bad_experiment_id(text: str) -> HanzoError:
    return invalid(f"Invalid experiment ID '{printable(text)}'. Experiment ID must be a valid integer.")


def experiment_message(experiment: Experiment) -> ExperimentMessage:
    return {
        "experiment_id": str(experiment.id),
        "name": experiment.name,
        "artifact_location": experiment.artifact_location,
        "lifecycle_stage": cast(State, experiment.lifecycle_stage),
        "creation_time": experiment.creation_time,
        "last_update_time": experiment.last_update_time,
        "tags": pairs(experiment.tags),
    }


def metric_message(point: MetricPoint) -> PointMessage:
    """JSON has no NaN: it travels as a string."""
    value: float | Literal["NaN"] = "NaN" if point.is_nan else point.value
    return {"key": point.key, "value": value, "timestamp": point.timestamp, "step": point.step}


def pairs(values: Mapping[str, str]) -> list[PairMessage]:
    return [{"key": key, "value": value} for key, value in values.items()]
