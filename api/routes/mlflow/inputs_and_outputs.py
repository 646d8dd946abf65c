"""Inputs and outputs of runs over MLflow's API: datasets and models."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from api.auth.permissions import Permission
from api.dependencies import CallerDep, TrackingDep
from api.json_bodies import TypedResponse
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import Message, OfRun, Required, experiment_number, mlflow_response
from resources.errors import invalid
from resources.metadata.field_rules import MAX_INT64
from resources.metadata.tracking.run_inputs import Dataset, DatasetInput, DatasetSummary
from resources.metadata.tracking.tracking import Tracking

router = Router("/mlflow", tag="mlflow")
paths_without_slash = Router(tag="mlflow")
"""MLflow's own definition of one path lacks a slash, and its clients call that path."""

REQUIRED_MODEL_FIELDS = frozenset({"artifact_path", "flavors", "utc_time_created", "run_id"})
COPIED_MODEL_FIELDS = ("run_id", "utc_time_created", "artifact_path", "model_uuid")


class ModelOutput(Message):
    model_id: Required
    step: int = 0


class LogOutputs(OfRun):
    models: tuple[ModelOutput, ...]


class LogModel(OfRun):
    model_json: Required


@router.post("/runs/outputs", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def log_outputs(body: LogOutputs, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    for model in body.models:
        if not -MAX_INT64 - 1 <= model.step <= MAX_INT64:
            raise invalid("Invalid value for parameter 'step' supplied: it must be a 64-bit integer")
    tracking.logged_models.log_outputs(body.run_id, {model.model_id: model.step for model in body.models})
    return mlflow_response()


@router.post("/runs/log-model", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def log_model(body: LogModel, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.model_history.append(body.run_id, history_entry(body.model_json))
    return mlflow_response()


def history_entry(model_json: str) -> dict[str, Any]:
    """Convert model info to a history entry without flavor configuration (`Model.get_tags_dict`, MLflow 3.17)."""
    try:
        model = json.loads(model_json)
    except (ValueError, RecursionError):
        raise invalid("Malformed model info. model_json is not a valid JSON.") from None
    if not isinstance(model, dict) or not isinstance(model.get("flavors", {}), dict):
        raise invalid("Malformed model info. model_json must be an object, and so must be its flavors.")
    missing = sorted(REQUIRED_MODEL_FIELDS - model.keys())
    if missing:
        raise invalid(f"Model json is missing mandatory fields: {', '.join(missing)}")
    flavors = {name: without_config(flavor) for name, flavor in model["flavors"].items()}
    return {**{name: model[name] for name in COPIED_MODEL_FIELDS if name in model}, "flavors": flavors}


def without_config(flavor: Any) -> Any:
    return {name: value for name, value in flavor.items() if name != "config"} if isinstance(flavor, dict) else flavor


MAX_EXPERIMENTS = 20


class InputTag(Message):
    key: str
    value: str = ""


class DatasetBody(Message):
    name: Required
    digest: Required
    source_type: str = ""
    source: str = ""
    columns: Annotated[str | None, Field(validation_alias="schema")] = None
    profile: str | None = None


class DatasetInputBody(Message):
    dataset: DatasetBody
    tags: tuple[InputTag, ...] = ()

    def logged(self) -> DatasetInput:
        named = self.dataset
        dataset = Dataset(named.name, named.digest, named.source_type, named.source, named.columns, named.profile)
        return DatasetInput(dataset, {tag.key: tag.value for tag in self.tags})


class ModelInput(Message):
    model_id: Required


class LogInputs(OfRun):
    datasets: tuple[DatasetInputBody, ...] = ()
    models: tuple[ModelInput, ...] = ()


class SearchDatasets(Message):
    experiment_ids: tuple[str, ...] = ()


@router.post("/runs/log-inputs", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def log_inputs(body: LogInputs, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.inputs.log(
        body.run_id, [dataset.logged() for dataset in body.datasets], [model.model_id for model in body.models]
    )
    return mlflow_response()


@paths_without_slash.post("/api/2.0mlflow/experiments/search-datasets", Permission.EXPERIMENTS_READ, read_only=True)
@paths_without_slash.post("/ajax-api/2.0mlflow/experiments/search-datasets", Permission.EXPERIMENTS_READ, read_only=True)
@router.post("/experiments/search-datasets", Permission.EXPERIMENTS_READ, read_only=True)
def search_datasets(
    body: SearchDatasets, tracking: TrackingDep, caller: CallerDep
) -> TypedResponse[responses.DatasetSummariesAnswer]:
    found = dataset_summaries(tracking, body.experiment_ids, caller.organization)
    return mlflow_response(dataset_summaries=[summary_message(summary) for summary in found])


def dataset_summaries(tracking: Tracking, experiment_ids: Sequence[str], organization: str) -> list[DatasetSummary]:
    """Return datasets of the experiments; raise a 400 for none or too many of them."""
    asked = len(experiment_ids)
    if not asked:
        raise invalid("SearchDatasets request must specify at least one experiment_id.")
    if asked > MAX_EXPERIMENTS:
        raise invalid(
            f"SearchDatasets request cannot specify more than {MAX_EXPERIMENTS} experiment_ids. "
            f"Received {asked} experiment_ids."
        )
    return tracking.inputs.summaries([experiment_number(text) for text in experiment_ids], organization)


def summary_message(summary: DatasetSummary) -> dict[str, Any]:
    message = {"experiment_id": str(summary.experiment_id), "name": summary.name, "digest": summary.digest}
    return message if summary.context is None else {**message, "context": summary.context}
