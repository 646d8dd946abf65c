"""Logged models as records, their naming rules, and their metrics."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from resources.errors import HanzoError, invalid, not_found
from resources.metadata.field_rules import (
    MAX_DATASET_DIGEST,
    MAX_DATASET_NAME,
    MAX_KEY,
    MetricPoint,
    check_length,
    checked_text,
    printable,
)
from resources.metadata.tables import logged_model_metrics, logged_models
from resources.metadata.transactions import insert_into

# A logged model: files that a training script saved, with params, tags and metrics. Pure: no database.
#
# MLflow 3 creates one for every `log_model`; a registered model version may be created from it.

STATUSES = ("pending", "ready", "failed")
MAX_NAME = 500
MAX_TYPE = 500
FORBIDDEN_IN_NAME = re.compile("[/:.%\"']")


@dataclass(frozen=True)
class LoggedModel:
    id: str
    experiment_id: int
    name: str
    artifact_uri: str
    status: str
    status_message: str
    model_type: str
    source_run_id: str | None
    lifecycle_stage: str
    created_at: int
    updated_at: int


@dataclass(frozen=True)
class ModelMetric:
    """A model's metric point, which may name a dataset, and the run that measured it."""

    run_id: str
    point: MetricPoint


@dataclass(frozen=True)
class Registration:
    """A registered model version that was created from a logged model."""

    name: str
    version: int


@dataclass(frozen=True)
class ModelDetails:
    """A logged model with its params, tags, metrics and registrations."""

    model: LoggedModel
    params: Mapping[str, str]
    tags: Mapping[str, str]
    metrics: Sequence[ModelMetric]
    registrations: Sequence[Registration]


def checked_model_name(name: str) -> str:
    """Check a model's name: MLflow uses it in paths and URIs."""
    if FORBIDDEN_IN_NAME.search(name):
        raise invalid(
            f"Invalid model name ({printable(name)!r}) provided. Model name must be a non-empty string and cannot contain "
            "the following characters: ('/', ':', '.', '%', '\"', \"'\")"
        )
    check_length("name", name, MAX_NAME)
    return checked_text(name, "name")


def checked_pair(key: str, value: str) -> tuple[str, str]:
    """Return a valid param or tag of a model."""
    if not key:
        raise invalid("Missing value for required parameter 'key'.")
    check_length("key", checked_text(key, "key"), MAX_KEY)
    return key, checked_text(value, "value")


def logged_model_not_found(model_id: str) -> HanzoError:
    return not_found(f"Logged model with ID '{printable(model_id)}' not found.")


# Metrics of logged models are written in the same transaction as those of the run that measured them.


def write_model_points(connection: Connection, run_id: str, points: Sequence[MetricPoint]) -> None:
    """Add a run's points that name a model to that model (idempotent).

    Raises:
        HanzoError: RESOURCE_DOES_NOT_EXIST if the model does not exist; the caller must roll its transaction back.
    """
    measured = [point for point in points if point.model_id]
    if not measured:
        return
    for point in measured:
        check_length("dataset_name", checked_text(point.dataset_name, "dataset_name"), MAX_DATASET_NAME)
        check_length("dataset_digest", checked_text(point.dataset_digest, "dataset_digest"), MAX_DATASET_DIGEST)
    ids = sorted({checked_text(point.model_id, "model_id") for point in measured})
    known = set(connection.execute(select(logged_models.c.id).where(logged_models.c.id.in_(ids))).scalars())
    for model_id in ids:
        if model_id not in known:
            raise logged_model_not_found(model_id)
    rows = [{"run_id": run_id, **point._asdict()} for point in measured]
    connection.execute(insert_into(connection, logged_model_metrics).on_conflict_do_nothing(), rows)


def load_model_points(reader: Connection, model_ids: Sequence[str]) -> dict[str, list[ModelMetric]]:
    """Return the metrics of a few hundred models, each by key and step."""
    columns = logged_model_metrics.c
    query = select(columns.run_id, *(columns[name] for name in MetricPoint._fields)).where(columns.model_id.in_(model_ids))
    loaded: dict[str, list[ModelMetric]] = {model_id: [] for model_id in model_ids}
    for run_id, *values in reader.execute(query.order_by(columns.key, columns.step, columns.timestamp, columns.run_id)):
        point = MetricPoint(*values)
        loaded[point.model_id].append(ModelMetric(run_id, point))
    return loaded
