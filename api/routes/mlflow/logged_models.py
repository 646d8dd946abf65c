"""/mlflow/logged-models/*: models that training scripts save, with params, tags, metrics and files (MLflow 3)."""

import json
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import BeforeValidator, Field, StrictBool

from api.artifacts.run_artifacts import checked_folder, checked_path
from api.auth.permissions import Permission
from api.dependencies import CallerDep, RunArtifactsDep, TrackingDep
from api.json_bodies import TypedResponse
from api.routes.mlflow.artifacts import artifact_response, file_message
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import Message, Required, experiment_number, metric_message, mlflow_response, pairs
from resources.errors import ErrorCode, HanzoError, invalid
from resources.metadata.artifacts.locations import check_proxied
from resources.metadata.filters.parser import Condition, parse_filter
from resources.metadata.tracking.logged_model_records import ModelDetails, ModelMetric
from resources.metadata.tracking.logged_model_search import LOGGED_MODEL_GRAMMAR, MeasuredOn, ModelOrder

router = Router("/mlflow/logged-models", tag="mlflow")

TO_MLFLOW = {
    "pending": "LOGGED_MODEL_PENDING",
    "ready": "LOGGED_MODEL_READY",
    "failed": "LOGGED_MODEL_UPLOAD_FAILED",
}
FROM_MLFLOW = {theirs: ours for ours, theirs in TO_MLFLOW.items()}
VERSIONS_TAG = "mlflow.modelVersions"
FILTER_STATUSES = {"UPLOAD_FAILED": "failed"}
NUMBERS = {str(number): theirs for number, theirs in enumerate(TO_MLFLOW.values(), start=1)}
Status = Annotated[Required, BeforeValidator(lambda value: NUMBERS.get(str(value), value))]
"""By name or, as protobuf's JSON allows, by number, also as text."""


class Pair(Message):
    key: Required
    value: str = ""


class CreateLoggedModel(Message):
    experiment_id: Required
    name: str = ""
    model_type: str = ""
    source_run_id: str = ""
    params: tuple[Pair, ...] = ()
    tags: tuple[Pair, ...] = ()


class FinalizeLoggedModel(Message):
    status: Status


class LoggedModelTags(Message):
    tags: tuple[Pair, ...] = ()


class LoggedModelParams(Message):
    params: tuple[Pair, ...] = ()


class OnDataset(Message):
    dataset_name: str = ""
    dataset_digest: str = ""

    def measured_on(self) -> MeasuredOn:
        return MeasuredOn(self.dataset_name, self.dataset_digest)


class OrderBy(OnDataset):
    field_name: Required
    ascending: bool = True


class SearchLoggedModels(Message):
    experiment_ids: tuple[str, ...]
    filter: str = ""
    datasets: tuple[OnDataset, ...] = ()
    max_results: int = Field(50, ge=1, le=50_000)
    order_by: tuple[OrderBy, ...] = ()
    page_token: str = ""
    include_metrics: StrictBool = True
    """MLflow's own pages request lists without metrics, which are smaller."""


@router.post("", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def create(body: CreateLoggedModel, tracking: TrackingDep) -> TypedResponse[responses.LoggedModelAnswer]:
    made = tracking.logged_models.create(
        experiment_number(body.experiment_id),
        name=body.name,
        model_type=body.model_type,
        source_run_id=body.source_run_id,
        params=last_values(body.params),
        tags=last_values(body.tags),
    )
    return mlflow_response(model=model_message(made))


@router.post("/search", Permission.EXPERIMENTS_READ, read_only=True)
def search(
    body: SearchLoggedModels, tracking: TrackingDep, caller: CallerDep
) -> TypedResponse[responses.LoggedModelsAnswer]:
    if not all(dataset.dataset_name for dataset in body.datasets):
        raise invalid("`dataset_name` in the `datasets` clause must be specified.")
    page = tracking.logged_model_search.search(
        [experiment_number(text) for text in body.experiment_ids],
        conditions=[translate_status(condition) for condition in parse_filter(body.filter, LOGGED_MODEL_GRAMMAR)],
        datasets=[dataset.measured_on() for dataset in body.datasets],
        orders=[
            ModelOrder(
                order.field_name,
                order.ascending,
                order.measured_on() if order.dataset_name or order.dataset_digest else None,
            )
            for order in body.order_by
        ],
        limit=body.max_results,
        page_token=body.page_token or None,
        organization=caller.organization,
    )
    models = [model_message(found) for found in page.models]
    if not body.include_metrics:
        for model in models:
            del model["data"]["metrics"]
    return mlflow_response(models=models, next_page_token=page.next_page_token)


@router.get("/{model_id}", Permission.EXPERIMENTS_READ, allows_jobs=True)
def get(model_id: str, tracking: TrackingDep, allow_deleted: bool = False) -> TypedResponse[responses.LoggedModelAnswer]:
    found = tracking.logged_models.get(model_id, allow_deleted=allow_deleted)
    return mlflow_response(model=model_message(tracking.logged_models.details(found)))


@router.patch("/{model_id}", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def finalize(model_id: str, body: FinalizeLoggedModel, tracking: TrackingDep) -> TypedResponse[responses.LoggedModelAnswer]:
    if body.status not in FROM_MLFLOW:
        raise invalid(
            f"Invalid value {body.status!r:.60} for parameter 'status' supplied: use one of {', '.join(FROM_MLFLOW)}"
        )
    return mlflow_response(model=model_message(tracking.logged_models.finalize(model_id, FROM_MLFLOW[body.status])))


@router.delete("/{model_id}", Permission.EXPERIMENTS_DELETE)
def delete(model_id: str, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.logged_models.delete(model_id)
    return mlflow_response()


@router.patch("/{model_id}/tags", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def set_tags(model_id: str, body: LoggedModelTags, tracking: TrackingDep) -> TypedResponse[responses.LoggedModelAnswer]:
    return mlflow_response(model=model_message(tracking.logged_models.set_tags(model_id, last_values(body.tags))))


@router.delete("/{model_id}/tags/{tag_key:path}", Permission.EXPERIMENTS_WRITE)
def delete_tag(model_id: str, tag_key: str, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.logged_models.delete_tag(model_id, tag_key)
    return mlflow_response()


@router.post("/{model_id}/params", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def log_params(model_id: str, body: LoggedModelParams, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.logged_models.log_params(model_id, last_values(body.params))
    return mlflow_response()


@router.get("/{model_id}/artifacts/directories", Permission.EXPERIMENTS_READ, allows_jobs=True)
def list_artifacts(
    model_id: str, tracking: TrackingDep, artifacts: RunArtifactsDep, artifact_directory_path: str = ""
) -> TypedResponse[responses.FilesAnswer]:
    folder = checked_folder(artifact_directory_path)
    model = tracking.logged_models.get(model_id)
    check_proxied(model.artifact_uri)
    files = [file_message(entry) for entry in artifacts.entries(model.id, folder)]
    return mlflow_response(root_uri=model.artifact_uri, files=files)


@router.get("/{model_id}/artifacts/files", Permission.EXPERIMENTS_READ, produces="*/*", ranges=True, head=True)
def download(
    model_id: str,
    request: Request,
    tracking: TrackingDep,
    artifacts: RunArtifactsDep,
    artifact_file_path: str = "",
) -> Response:
    if not artifact_file_path:
        raise HanzoError(ErrorCode.BAD_REQUEST, 'Request must include the "artifact_file_path" query parameter.')
    checked_path(artifact_file_path)
    model = tracking.logged_models.get(model_id)
    check_proxied(model.artifact_uri)
    return artifact_response(artifacts, model.id, artifact_file_path, request)


def last_values(sent: tuple[Pair, ...]) -> dict[str, str]:
    """Return each key once, with its last value."""
    return {pair.key: pair.value for pair in sent}


def translate_status(condition: Condition) -> Condition:
    """Translate statuses as MLflow's client shows them: READY, PENDING, UPLOAD_FAILED."""
    if (condition.entity, condition.key) != ("attribute", "status"):
        return condition
    if isinstance(condition.value, tuple):
        return replace(condition, value=tuple(stored_status(text) for text in condition.value))
    return replace(condition, value=stored_status(str(condition.value)))


def stored_status(text: str) -> str:
    short = text.removeprefix("LOGGED_MODEL_")
    return FILTER_STATUSES.get(short, short.lower())


def model_message(found: ModelDetails) -> dict[str, Any]:
    """Convert a model to MLflow's JSON; the registry overrides the tag with its versions."""
    model = found.model
    made = [{"name": each.name, "version": each.version} for each in found.registrations]
    tags = {**found.tags, VERSIONS_TAG: json.dumps(made)} if made else found.tags
    info = {
        "model_id": model.id,
        "experiment_id": str(model.experiment_id),
        "name": model.name,
        "creation_timestamp_ms": model.created_at,
        "last_updated_timestamp_ms": model.updated_at,
        "artifact_uri": model.artifact_uri,
        "status": TO_MLFLOW[model.status],
        "model_type": model.model_type,
        "source_run_id": model.source_run_id or "",
        "tags": pairs(tags),
        "registrations": [{"name": made.name, "version": str(made.version)} for made in found.registrations],
    }
    if model.status_message:
        info["status_message"] = model.status_message
    return {
        "info": info,
        "data": {"params": pairs(found.params), "metrics": [point_message(each) for each in found.metrics]},
    }


def point_message(measured: ModelMetric) -> dict[str, Any]:
    point = measured.point
    on = {"dataset_name": point.dataset_name, "dataset_digest": point.dataset_digest}
    known = {name: text for name, text in on.items() if text}
    return {**metric_message(point), **known, "model_id": point.model_id, "run_id": measured.run_id}
