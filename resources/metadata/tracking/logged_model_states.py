"""What a logged model is: files that a training script saved, with params, tags and metrics. Pure: no database.

A logged model is what MLflow 3 makes of every `log_model`; a registered model version may be made from one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resources.errors import HanzoError, invalid, not_found
from resources.metadata.tracking_rules import MAX_KEY, MetricPoint, check_length, checked_text, printable

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
    """A point that belongs to a model, on a dataset where the point names one, and the run that measured it."""

    run_id: str
    point: MetricPoint


@dataclass(frozen=True)
class Registration:
    """A version of a registered model that was made from a logged model."""

    name: str
    version: int


@dataclass(frozen=True)
class ModelDetails:
    """A logged model with what was logged about it."""

    model: LoggedModel
    params: Mapping[str, str]
    tags: Mapping[str, str]
    metrics: Sequence[ModelMetric]
    registrations: Sequence[Registration]


def checked_model_name(name: str) -> str:
    """MLflow's rule: a model's name is a part of paths and URIs."""
    if FORBIDDEN_IN_NAME.search(name):
        raise invalid(
            f"Invalid model name ({printable(name)!r}) provided. Model name must be a non-empty string and cannot contain "
            "the following characters: ('/', ':', '.', '%', '\"', \"'\")"
        )
    check_length("name", name, MAX_NAME)
    return checked_text(name, "name")


def checked_pair(key: str, value: str) -> tuple[str, str]:
    """A param or tag of a model."""
    if not key:
        raise invalid("Missing value for required parameter 'key'.")
    check_length("key", checked_text(key, "key"), MAX_KEY)
    return key, checked_text(value, "value")


def no_model(model_id: str) -> HanzoError:
    return not_found(f"Logged model with ID '{printable(model_id)}' not found.")
