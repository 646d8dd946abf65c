"""Request bodies and response messages that several MLflow endpoints share."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from fastapi import Depends, Query
from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from api.errors import SEE_DOCS
from api.json_bodies import Body, Number, TypedResponse, proto_fields
from api.schemas.mlflow.responses import ExperimentMessage, PairMessage, PointMessage, State
from resources.errors import HanzoError, invalid
from resources.metadata.field_rules import MAX_INT64, MetricPoint, metric_point, printable
from resources.metadata.tracking.experiments import Experiment

# MLflow's JSON messages for experiments, and what all messages share. Unset fields are left out, as protobuf does.

VIEWS = {"ACTIVE_ONLY": ("active",), "DELETED_ONLY": ("deleted",), "ALL": ("active", "deleted")}


def mlflow_response(**fields: Any) -> TypedResponse[Any]:
    return TypedResponse(msgspec.json.encode({name: value for name, value in fields.items() if value is not None}))


def experiment_number(text: str) -> int:
    """Convert MLflow's text id to a number; a negative one is valid, but never found."""
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
    """Convert a point; JSON has no NaN, so it is encoded as a string."""
    value: float | Literal["NaN"] = "NaN" if point.is_nan else point.value
    return {"key": point.key, "value": value, "timestamp": point.timestamp, "step": point.step}


def pairs(values: Mapping[str, str]) -> list[PairMessage]:
    return [{"key": key, "value": value} for key, value in values.items()]


async def find_run_id(run_id: Annotated[str | None, Query()] = None, run_uuid: Annotated[str | None, Query()] = None) -> str:
    named = run_id or run_uuid
    if not named:
        raise invalid(f"Missing value for required parameter 'run_id'. {SEE_DOCS}")
    return named


RunIdParameter = Annotated[str, Depends(find_run_id)]


Required = Annotated[str, Field(min_length=1)]
"""Non-empty text: in protobuf's JSON an empty text counts as absent."""
RunId = Annotated[Required, Field(validation_alias=AliasChoices("run_id", "run_uuid"))]
"""Old clients send `run_uuid`, new ones both."""
MAX_BATCH_BYTES = 1_000_000
"""Size limit of a log-batch, as MLflow documents it."""
VIEW_NAMES = {"1": "ACTIVE_ONLY", "2": "DELETED_ONLY", "3": "ALL"}
View = Annotated[
    Literal["ACTIVE_ONLY", "DELETED_ONLY", "ALL"],
    BeforeValidator(lambda value: VIEW_NAMES.get(str(value), value)),
]
"""By name or, as protobuf's JSON allows, by number, also as text: MLflow's Python client sends `ViewType.ALL` as one."""


class Message(Body):
    """A body in protobuf's JSON: null means absent, and `runId` means `run_id`."""

    @model_validator(mode="before")
    @classmethod
    def _fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: given for name, given in proto_fields(value).items() if given is not None}


class Tag(Message):
    key: str
    value: str = ""


class OfRun(Message):
    run_id: RunId


class MetricBody(Message):
    key: Required
    value: Number
    timestamp: int
    step: int = 0
    model_id: str = ""
    dataset_name: str = ""
    dataset_digest: str = ""

    def point(self, path: str = "") -> MetricPoint:
        of_model = (self.model_id, self.dataset_name, self.dataset_digest)
        return metric_point(self.key, float(self.value), self.step, self.timestamp, path, *of_model)
