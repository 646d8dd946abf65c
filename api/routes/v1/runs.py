"""/v1/runs: create, read, compare, log to, delete and replay runs."""

from typing import Annotated, Literal, cast

from fastapi import Query, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from typing_extensions import TypedDict

from api.artifacts.run_artifacts import RunArtifacts, checked_path
from api.auth.ownership import split_ids
from api.auth.permissions import Permission
from api.dependencies import CallerDep, DatabaseDep, RunArtifactsDep, SettingsDep, StoreDep, TrackingDep
from api.idempotency import JobIdFromKey
from api.json_bodies import Body, Number, TypedResponse, json_response
from api.routes.mlflow.artifacts import store_body
from api.routes.v1.upload_forms import is_form, no_key, receive_form
from api.routing import Audit, Router
from api.schemas.mlflow.messages import experiment_number
from api.schemas.mlflow.responses import NothingAnswer
from api.schemas.v1.jobs import Job, job_json
from api.schemas.v1.runs import Comparison, RunArtifact, RunWithArtifacts, StoredArtifact, comparison, run_json
from recipes.contracts.frozen_model import Name
from resources.errors import invalid
from resources.installation import SOURCE
from resources.metadata.field_rules import metric_point
from resources.metadata.outbox import now_ms
from resources.metadata.tracking.logged_runs import load_logged
from resources.metadata.tracking.run_data import MAX_PARAMS, check_run_active
from resources.metadata.tracking.run_states import Run
from resources.metadata.tracking.tracking import Tracking
from resources.replay.comparison import Difference
from resources.replay.submission import read_finished_run, submit_replay
from resources.replay.verdict import Verdict, read_verdict
from resources.scheduling.quotas import count_gpus, refuse_impossible_job


class Replay(TypedDict):
    """The queued job, and the differences between its environment and the first run's."""

    job: Job
    environment: list[Difference]


router = Router("/v1/runs", tag="v1")

MAX_COMPARED = 100

Text = str | int | float | bool


class NewRun(Body):
    """Names its experiment by id or by name; an unused name creates an experiment."""

    experiment_id: str | None = None
    experiment_name: Name | None = None
    name: Name | None = None
    status: Literal["queued", "running"] = "running"
    params: dict[str, Text] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)


class NewMetric(Body):
    key: str
    value: Number
    step: int = 0
    timestamp: int | None = None


class NewMetrics(Body):
    metrics: list[NewMetric]


class NewParams(Body):
    params: dict[str, Text]


class NewStatus(Body):
    status: Literal["queued", "running", "completed", "failed", "cancelled"]
    end_time: int | None = None


@router.post("", Permission.EXPERIMENTS_WRITE, status_code=201)
def create(body: NewRun, tracking: TrackingDep, caller: CallerDep) -> TypedResponse[RunWithArtifacts]:
    if (body.experiment_id is None) == (body.experiment_name is None):
        raise invalid("A run belongs to one experiment: give either experiment_id or experiment_name")
    with tracking.write() as connection:
        if body.experiment_name is not None:
            number = tracking.experiments.ensure(body.experiment_name, caller.organization, connection=connection).id
        else:
            number = experiment_number(body.experiment_id or "")
        run = tracking.runs.create(
            number, name=body.name, user_id=caller.user_id, tags=body.tags, status=body.status, connection=connection
        )
        tracking.run_data.log_batch(run.id, params=params_as_text(body.params), connection=connection)
        # Read before the commit, and without the store, which cannot have files yet.
        made: RunWithArtifacts = {**run_json(tracking.run_search.get(run, connection=connection)), "artifacts": []}
    return json_response(made, status_code=201)


@router.get("/compare", Permission.EXPERIMENTS_READ)  # before the run of that name
def compare(ids: Annotated[list[str], Query()], tracking: TrackingDep) -> TypedResponse[Comparison]:
    """Compare runs, given as `ids=A,B` or `ids=A&ids=B`."""
    wanted = split_ids(ids)
    if not 2 <= len(wanted) <= MAX_COMPARED:
        raise invalid(f"Between 2 and {MAX_COMPARED} runs can be compared at once, not {len(wanted)}: give ids=RUN,RUN")
    with tracking.read() as connection:
        found = [tracking.runs.get(run_id, connection=connection) for run_id in wanted]
        return json_response(comparison(load_logged(connection, found)))


@router.get("/{run_id}", Permission.EXPERIMENTS_READ, allows_jobs=True)
def get(run_id: str, tracking: TrackingDep, artifacts: RunArtifactsDep) -> TypedResponse[RunWithArtifacts]:
    return json_response(run_with_artifacts(tracking, artifacts, tracking.runs.get(run_id)))


@router.delete("/{run_id}", Permission.EXPERIMENTS_DELETE)
def delete(run_id: str, tracking: TrackingDep, artifacts: RunArtifactsDep) -> TypedResponse[RunWithArtifacts]:
    """Hide a run; MLflow's `runs/restore` undoes it."""
    tracking.runs.delete(run_id)
    return json_response(run_with_artifacts(tracking, artifacts, tracking.runs.get(run_id)))


@router.post("/{run_id}/metrics", Permission.EXPERIMENTS_WRITE, audit=Audit.COUNTED, allows_jobs=True)
def log_metrics(run_id: str, body: NewMetrics, tracking: TrackingDep) -> TypedResponse[NothingAnswer]:
    now = now_ms()
    points = [
        metric_point(
            new.key,
            float(new.value),
            new.step,
            now if new.timestamp is None else new.timestamp,
            f"metrics[{index}]",
        )
        for index, new in enumerate(body.metrics)
    ]
    tracking.run_data.log_batch(run_id, points)
    return json_response(NothingAnswer())


@router.post("/{run_id}/params", Permission.EXPERIMENTS_WRITE, audit=Audit.COUNTED, allows_jobs=True)
def log_params(run_id: str, body: NewParams, tracking: TrackingDep) -> TypedResponse[NothingAnswer]:
    tracking.run_data.log_batch(run_id, params=params_as_text(body.params))
    return json_response(NothingAnswer())


@router.post("/{run_id}/artifacts", Permission.EXPERIMENTS_WRITE, allows_jobs=True, streams_body=True, status_code=201)
async def upload(
    run_id: str,
    request: Request,
    tracking: TrackingDep,
    artifacts: RunArtifactsDep,
    key: Annotated[str | None, Query(min_length=1, description="required unless the body is a form")] = None,
) -> TypedResponse[StoredArtifact]:
    """Store the request body as the artifact `key`, or the file of a form (multipart/form-data).

    A form's file is stored under `key`, else the form's field of that name, else its own name.
    """
    run = await run_in_threadpool(tracking.runs.get, run_id)
    check_run_active(run.id, run.lifecycle_stage)
    if is_form(request):
        key, stored = await receive_form(request, artifacts, run.id, key)
    elif key is None:
        raise no_key()
    else:
        stored = await store_body(request, artifacts, run.id, checked_path(key))
    return json_response({"key": key, "path": stored.uri, "size": stored.size, "sha256": stored.sha256}, status_code=201)


@router.patch("/{run_id}/status", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def set_status(
    run_id: str, body: NewStatus, tracking: TrackingDep, artifacts: RunArtifactsDep
) -> TypedResponse[RunWithArtifacts]:
    run = tracking.runs.set_status(run_id, body.status, end_time=body.end_time)
    return json_response(run_with_artifacts(tracking, artifacts, run))


def run_with_artifacts(tracking: Tracking, artifacts: RunArtifacts, run: Run) -> RunWithArtifacts:
    keys = cast(list[RunArtifact], artifacts.keys(run.id))
    return {**run_json(tracking.run_search.get(run)), "artifacts": keys}


def params_as_text(params: dict[str, Text]) -> list[tuple[str, str]]:
    """Convert params to text as MLflow's client does: `2e-5` to '2e-05', `true` to 'True'."""
    if len(params) > MAX_PARAMS:
        raise invalid(f"A request can contain at most {MAX_PARAMS} params. Got {len(params)} params.")
    return [(key, str(value)) for key, value in params.items()]


@router.post("/{run_id}/replay", Permission.JOBS_SUBMIT, status_code=201)
def replay(
    run_id: str, database: DatabaseDep, store: StoreDep, settings: SettingsDep, caller: CallerDep, new_job_id: JobIdFromKey
) -> TypedResponse[Replay]:
    """Queue the run's replay; `environment` lists the differences known before it starts.

    A repeated Idempotency-Key returns the existing job.
    """
    first = read_finished_run(database, store, run_id)
    recipe, quota = first.record.recipe, settings.scheduler.quotas.get(first.job.organization)
    refuse_impossible_job(quota, count_gpus(recipe.hardware, recipe.distributed))
    made = submit_replay(database, store, first, SOURCE, caller.user_id, new_job_id)
    return json_response(Replay(job=job_json(made.job), environment=list(made.environment)), 201)


@router.get("/{run_id}/replay", Permission.EXPERIMENTS_READ)
def verdict(run_id: str, database: DatabaseDep, store: StoreDep) -> TypedResponse[Verdict]:
    """Compare losses and final weights of a completed replay to the first run's."""
    return json_response(read_verdict(database, store, run_id))
