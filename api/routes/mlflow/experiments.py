"""/mlflow/experiments/*: the groups of runs that clients log to."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query
from pydantic import Field

from api.auth.permissions import LOCAL, Permission
from api.dependencies import CallerDep, TrackingDep
from api.fast_path.reads import FastQuery, FastSearch, parse_fields
from api.json_bodies import TypedResponse
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import (
    VIEWS,
    Message,
    Required,
    Tag,
    View,
    experiment_message,
    experiment_number,
    mlflow_response,
)
from resources.metadata.artifacts.locations import absolute_location
from resources.metadata.filters.parser import parse_filter, parse_orders
from resources.metadata.tracking.experiment_search import EXPERIMENT_GRAMMAR

router = Router("/mlflow/experiments", tag="mlflow")


class CreateExperiment(Message):
    name: Required
    artifact_location: str = ""
    tags: tuple[Tag, ...] = ()


class ExperimentId(Message):
    experiment_id: Required


class UpdateExperiment(ExperimentId):
    new_name: Required


class ExperimentTag(ExperimentId):
    key: Required
    value: str = ""


class ExperimentTagKey(ExperimentId):
    key: Required


class SearchExperiments(Message):
    max_results: int = Field(1000, ge=1, le=50_000)
    page_token: str = ""
    filter: str = ""
    order_by: tuple[str, ...] = ()
    view_type: View = "ACTIVE_ONLY"


@router.post("/create", Permission.EXPERIMENTS_WRITE)
def create(body: CreateExperiment, tracking: TrackingDep, caller: CallerDep) -> TypedResponse[responses.ExperimentIdAnswer]:
    tags = {tag.key: tag.value for tag in body.tags}
    # Without sign-in all callers are on this machine: relative paths refer to the server's folder, as in MLflow.
    location = absolute_location(body.artifact_location, str(Path.cwd())) if caller is LOCAL else body.artifact_location
    made = tracking.experiments.create(body.name, caller.organization, artifact_location=location, tags=tags)
    return mlflow_response(experiment_id=str(made.id))


@router.get(
    "/get",
    Permission.EXPERIMENTS_READ,
    allows_jobs=True,
    fast_path=FastQuery(partial(parse_fields, known={"experiment_id"})),
)
def get(experiment_id: Required, tracking: TrackingDep) -> TypedResponse[responses.ExperimentAnswer]:
    return mlflow_response(experiment=experiment_message(tracking.experiments.get(experiment_number(experiment_id))))


@router.get(
    "/get-by-name",
    Permission.EXPERIMENTS_READ,
    fast_path=FastQuery(partial(parse_fields, known={"experiment_name"})),
)
def get_by_name(
    experiment_name: Required, tracking: TrackingDep, caller: CallerDep
) -> TypedResponse[responses.ExperimentAnswer]:
    found = tracking.experiments.get_by_name(experiment_name, caller.organization)
    return mlflow_response(experiment=experiment_message(found))


@router.post("/search", Permission.EXPERIMENTS_READ, read_only=True, fast_path=FastSearch())
def search(body: SearchExperiments, tracking: TrackingDep, caller: CallerDep) -> TypedResponse[responses.ExperimentsAnswer]:
    page = tracking.experiment_search.search(
        caller.organization,
        conditions=parse_filter(body.filter, EXPERIMENT_GRAMMAR),
        orders=parse_orders(body.order_by, EXPERIMENT_GRAMMAR),
        lifecycle_stages=VIEWS[body.view_type],
        limit=body.max_results,
        page_token=body.page_token or None,
    )
    found: list[Any] = [experiment_message(experiment) for experiment in page.experiments]
    return mlflow_response(experiments=found, next_page_token=page.next_page_token)


@router.get("/search", Permission.EXPERIMENTS_READ)
def search_by_query(
    query: Annotated[SearchExperiments, Query()], tracking: TrackingDep, caller: CallerDep
) -> TypedResponse[responses.ExperimentsAnswer]:
    return search(query, tracking, caller)


@router.post("/update", Permission.EXPERIMENTS_WRITE)
def update(body: UpdateExperiment, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.experiments.rename(experiment_number(body.experiment_id), body.new_name)
    return mlflow_response()


@router.post("/delete", Permission.EXPERIMENTS_DELETE)
def delete(body: ExperimentId, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.experiments.delete(experiment_number(body.experiment_id))
    return mlflow_response()


@router.post("/restore", Permission.EXPERIMENTS_DELETE)
def restore(body: ExperimentId, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.experiments.restore(experiment_number(body.experiment_id))
    return mlflow_response()


@router.post("/set-experiment-tag", Permission.EXPERIMENTS_WRITE)
def set_tag(body: ExperimentTag, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.experiments.set_tag(experiment_number(body.experiment_id), body.key, body.value)
    return mlflow_response()


@router.post("/delete-experiment-tag", Permission.EXPERIMENTS_WRITE)
def delete_tag(body: ExperimentTagKey, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.experiments.delete_tag(experiment_number(body.experiment_id), body.key)
    return mlflow_response()
