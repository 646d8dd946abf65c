"""/v1/experiments: create, list and delete experiments, and list their runs.

A run of an experiment is also served below /api/v1.
"""

from typing import Annotated

from fastapi import Query
from pydantic import Field

from api.auth.permissions import Permission
from api.dependencies import CallerDep, RunArtifactsDep, TrackingDep
from api.json_bodies import Body, TypedResponse, json_response
from api.routes.v1.runs import run_with_artifacts
from api.routing import Router
from api.schemas.mlflow.messages import experiment_number
from api.schemas.v1.runs import (
    DESCRIPTION_TAG,
    OWNER_TAG,
    Experiment,
    Experiments,
    Runs,
    RunWithArtifacts,
    experiment_json,
    run_json,
)
from recipes.contracts.frozen_model import Name
from resources.errors import not_found
from resources.monitoring.usage_totals import sum_gpu_hours_by_experiment

router = Router("/v1/experiments", tag="v1", alias_prefix="/api/v1/experiments")

Limit = Annotated[int, Query(ge=1, le=1000)]


class NewExperiment(Body):
    name: Name
    description: str = ""
    owner: str = ""
    tags: dict[str, str] = Field(default_factory=dict)


@router.get("", Permission.EXPERIMENTS_READ)
def list_experiments(
    tracking: TrackingDep, caller: CallerDep, max_results: Limit = 100, page_token: str = ""
) -> TypedResponse[Experiments]:
    with tracking.read() as connection:
        page = tracking.experiment_search.search(
            caller.organization, limit=max_results, page_token=page_token or None, connection=connection
        )
        hours = sum_gpu_hours_by_experiment(connection, [experiment.id for experiment in page.experiments])
    found = [experiment_json(experiment, hours[experiment.id]) for experiment in page.experiments]
    return json_response({"experiments": found, "next_page_token": page.next_page_token})


@router.post("", Permission.EXPERIMENTS_WRITE, status_code=201)
def create(body: NewExperiment, tracking: TrackingDep, caller: CallerDep) -> TypedResponse[Experiment]:
    words = {DESCRIPTION_TAG: body.description, OWNER_TAG: body.owner or caller.user_id}
    tags = {**{key: text for key, text in words.items() if text}, **body.tags}
    made = tracking.experiments.create(body.name, caller.organization, tags=tags)
    return json_response(experiment_json(made, gpu_hours=0.0), status_code=201)  # it has no run yet


@router.get("/{experiment_id}", Permission.EXPERIMENTS_READ)
def get(experiment_id: str, tracking: TrackingDep) -> TypedResponse[Experiment]:
    with tracking.read() as connection:
        experiment = tracking.experiments.get(experiment_number(experiment_id), connection=connection)
        hours = sum_gpu_hours_by_experiment(connection, [experiment.id])
    return json_response(experiment_json(experiment, hours[experiment.id]))


@router.delete("/{experiment_id}", Permission.EXPERIMENTS_DELETE)
def delete(experiment_id: str, tracking: TrackingDep) -> TypedResponse[Experiment]:
    """Hide an experiment and its runs; MLflow's `experiments/restore` undoes it."""
    with tracking.write() as connection:
        number = experiment_number(experiment_id)
        tracking.experiments.delete(number, connection=connection)
        deleted = tracking.experiments.get(number, connection=connection)
        hours = sum_gpu_hours_by_experiment(connection, [number])
    return json_response(experiment_json(deleted, hours[number]))


@router.get("/{experiment_id}/runs", Permission.EXPERIMENTS_READ)
def list_runs(
    experiment_id: str, tracking: TrackingDep, max_results: Limit = 100, page_token: str = ""
) -> TypedResponse[Runs]:
    experiment = tracking.experiments.get(experiment_number(experiment_id))
    page = tracking.run_search.search([experiment.id], limit=max_results, page_token=page_token or None)
    return json_response({"runs": [run_json(run) for run in page.runs], "next_page_token": page.next_page_token})


@router.get("/{experiment_id}/runs/{run_id}", Permission.EXPERIMENTS_READ, allows_jobs=True, alias=True)
def get_run(
    experiment_id: str, run_id: str, tracking: TrackingDep, artifacts: RunArtifactsDep
) -> TypedResponse[RunWithArtifacts]:
    """Return a run of this experiment, as `/v1/runs/{run_id}` does."""
    experiment, run = tracking.experiments.get(experiment_number(experiment_id)), tracking.runs.get(run_id)
    if run.experiment_id != experiment.id:
        raise not_found(f"Experiment {experiment_id} has no run {run_id}: it belongs to experiment {run.experiment_id}")
    return json_response(run_with_artifacts(tracking, artifacts, run))
