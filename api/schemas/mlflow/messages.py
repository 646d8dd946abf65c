"""Our experiments as MLflow's JSON messages, and what all messages share. Unset fields are left out, as protobuf does."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Response

from resources.errors import HanzoError, invalid
from resources.metadata.tracking.experiments import Experiment
from resources.metadata.tracking_rules import MAX_INT64, MetricPoint, printable

VIEWS = {"ACTIVE_ONLY": ("active",), "DELETED_ONLY": ("deleted",), "ALL": ("active", "deleted")}


def answer(**fields: Any) -> Response:
    content = msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
    return Response(content, media_type="application/json")


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


def metric_message(point: MetricPoint) -> dict[str, Any]:
    """JSON has no NaN: it travels as a string."""
    value = "NaN" if point.is_nan else point.value
    return {"key": point.key, "value": value, "timestamp": point.timestamp, "step": point.step}


def pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]
