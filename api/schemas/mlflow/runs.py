"""MLflow's JSON messages for runs.

Structs instead of dicts: a page has tens of thousands of them, at half the cost.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator
from sqlalchemy import Connection

from api.schemas.mlflow.messages import pairs
from resources.errors import invalid
from resources.metadata.field_rules import MetricPoint
from resources.metadata.filters.parser import Condition
from resources.metadata.tracking.logged_runs import LoggedRun, load_logged
from resources.metadata.tracking.run_inputs import DatasetInput
from resources.metadata.tracking.run_states import Run
from resources.metadata.tracking.tracking import Tracking

TO_MLFLOW = {
    "queued": "SCHEDULED",
    "running": "RUNNING",
    "completed": "FINISHED",
    "failed": "FAILED",
    "cancelled": "KILLED",
}
FROM_MLFLOW = {theirs: ours for ours, theirs in TO_MLFLOW.items()}

NUMBERS = {"1": "RUNNING", "2": "SCHEDULED", "3": "FINISHED", "4": "FAILED", "5": "KILLED"}
Status = Annotated[str, BeforeValidator(lambda value: NUMBERS.get(str(value), value))]
"""By name or, as protobuf's JSON allows, by number, also as text."""


def status_from_mlflow(theirs: str) -> str:
    if theirs not in FROM_MLFLOW:
        raise invalid(f"Invalid value {theirs!r:.60} for parameter 'status' supplied: use one of {', '.join(FROM_MLFLOW)}")
    return FROM_MLFLOW[theirs]


def translate_status_conditions(conditions: Iterable[Condition]) -> list[Condition]:
    """Translate conditions on status, with any comparator, to lists of matching statuses."""
    return [
        replace(
            condition,
            operator="IN",
            value=tuple(ours for ours, theirs in TO_MLFLOW.items() if matches_status(condition, theirs)),
        )
        if (condition.entity, condition.key) == ("attribute", "status")
        else condition
        for condition in conditions
    ]


def matches_status(condition: Condition, theirs: str) -> bool:
    """Return whether a condition matches one of MLflow's statuses."""
    value = condition.value
    if isinstance(value, tuple):
        return (theirs in value) == (condition.operator == "IN")
    if condition.operator in ("=", "!="):
        return (theirs == value) == (condition.operator == "=")
    # Merge repeated '%': a hundred in a row would make the regular expression backtrack exponentially.
    once = re.sub("%+", "%", str(value))
    pattern = re.escape(once).replace("%", ".*").replace("_", ".")
    flags = re.IGNORECASE | re.DOTALL if condition.operator == "ILIKE" else re.DOTALL
    return re.fullmatch(pattern, theirs, flags) is not None


_encode = msgspec.json.Encoder().encode


class PointMessage(msgspec.Struct, gc=False):
    """A point; JSON has no NaN, so it is encoded as a string."""

    key: str
    value: float | str
    timestamp: int
    step: int


class PairMessage(msgspec.Struct, gc=False):
    key: str
    value: str


class InfoMessage(msgspec.Struct, gc=False):
    run_id: str
    run_uuid: str
    run_name: str
    experiment_id: str
    user_id: str
    status: str
    start_time: int | UnsetType
    end_time: int | UnsetType
    artifact_uri: str
    lifecycle_stage: str


class DataMessage(msgspec.Struct):
    metrics: list[PointMessage]
    params: list[PairMessage]
    tags: list[PairMessage]


class LogMessage(msgspec.Struct):
    """The parts of a run's message that depend on its revision."""

    data: DataMessage
    inputs: dict[str, list[Any]]
    outputs: dict[str, list[Any]]


class RunMessage(LogMessage):
    info: InfoMessage


def run_message(logged: LoggedRun) -> RunMessage:
    log = log_message(logged)
    return RunMessage(data=log.data, inputs=log.inputs, outputs=log.outputs, info=info_message(logged.run))


def run_texts(tracking: Tracking, reader: Connection, found: Sequence[Run]) -> list[msgspec.Raw]:
    """Return messages of runs as JSON, in order; logged data may be cached."""

    def texts(missing: Sequence[Run]) -> Iterable[bytes]:
        return (_encode(log_message(logged)) for logged in load_logged(reader, missing))

    logs = tracking.renderings.get_or_render(found, texts)
    # Merge two JSON objects textually: the second continues where the first would end.
    return [
        msgspec.Raw(b'{"info":' + _encode(info_message(run)) + b"," + log[1:]) for run, log in zip(found, logs, strict=True)
    ]


def log_message(logged: LoggedRun) -> LogMessage:
    data = DataMessage(point_messages(logged.metrics), pair_messages(logged.params), pair_messages(logged.tags))
    inputs, outputs = inputs_and_outputs(logged) if logged.inputs or logged.models else ({}, {})
    return LogMessage(data, inputs, outputs)


def info_message(run: Run) -> InfoMessage:
    return InfoMessage(
        run.id,
        run.id,
        run.name,
        str(run.experiment_id),
        run.user_id,
        TO_MLFLOW[run.status],
        UNSET if run.start_time is None else run.start_time,
        UNSET if run.end_time is None else run.end_time,
        run.artifact_uri,
        run.lifecycle_stage,
    )


def point_messages(points: Iterable[MetricPoint]) -> list[PointMessage]:
    return [PointMessage(key, "NaN" if is_nan else value, time, step) for key, value, step, time, is_nan, _, _, _ in points]


def pair_messages(values: Mapping[str, str]) -> list[PairMessage]:
    return list(starmap(PairMessage, values.items()))


def inputs_and_outputs(logged: LoggedRun) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return the inputs and the outputs of a run."""
    inputs = without_empty_lists(
        dataset_inputs=[input_message(used) for used in logged.inputs],
        model_inputs=[{"model_id": model.model_id} for model in logged.models if model.direction == "input"],
    )
    models = [{"model_id": model.model_id, "step": model.step} for model in logged.models if model.direction == "output"]
    return inputs, without_empty_lists(model_outputs=models)


def input_message(used: DatasetInput) -> dict[str, Any]:
    fields = {name: value for name, value in vars(used.dataset).items() if value is not None}
    return {"tags": pairs(used.tags), "dataset": fields}


def without_empty_lists(**lists: list[Any]) -> dict[str, list[Any]]:
    return {name: values for name, values in lists.items() if values}
