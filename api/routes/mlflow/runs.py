"""/mlflow/runs/*: create, read, update, delete, restore and search runs (logging: `run_logging`)."""

from pydantic import Field

from api.auth.permissions import Permission
from api.dependencies import CallerDep, TrackingDep
from api.fast_path.reads import FastQuery, FastSearch, parse_run
from api.idempotency import IdempotencyKey, run_id_from_key
from api.json_bodies import TypedResponse
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import VIEWS, Message, OfRun, RunIdParameter, Tag, View, experiment_number, mlflow_response
from api.schemas.mlflow.runs import (
    Status,
    info_message,
    run_message,
    run_texts,
    status_from_mlflow,
    translate_status_conditions,
)
from resources.metadata.filters.parser import parse_filter, parse_orders
from resources.metadata.tracking.experiments import DEFAULT_ID
from resources.metadata.tracking.run_search import RUN_GRAMMAR

router = Router("/mlflow/runs", tag="mlflow")


class CreateRun(Message):
    experiment_id: str = ""
    user_id: str = ""
    run_name: str = ""
    start_time: int | None = None
    tags: tuple[Tag, ...] = ()


class UpdateRun(OfRun):
    status: Status | None = None
    end_time: int | None = None
    run_name: str | None = None


class SearchRuns(Message):
    experiment_ids: tuple[str, ...] = ()
    filter: str = ""
    run_view_type: View = "ACTIVE_ONLY"
    max_results: int = Field(1000, ge=1, le=50_000)
    order_by: tuple[str, ...] = ()
    page_token: str = ""


@router.post("/create", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def create(
    body: CreateRun, tracking: TrackingDep, caller: CallerDep, idempotency_key: IdempotencyKey = None
) -> TypedResponse[responses.RunAnswer]:
    """Create a run; a repeated Idempotency-Key returns the existing run, and ignores the body."""
    # Read the response before the commit: if reading failed after it, the client would create the run again.
    with tracking.write() as writer:
        made = tracking.runs.create(
            experiment_number(body.experiment_id or str(DEFAULT_ID)),
            name=body.run_name or None,
            user_id=caller.user_or(body.user_id),
            tags={tag.key: tag.value for tag in body.tags},
            start_time=body.start_time,
            run_id=run_id_from_key(idempotency_key, caller) if idempotency_key else None,
            may_exist=True,
            connection=writer,
        )
        message = run_message(tracking.run_search.get(made, connection=writer))
    return mlflow_response(run=message)


@router.get("/get", Permission.EXPERIMENTS_READ, allows_jobs=True, fast_path=FastQuery(parse_run))
def get(
    tracking: TrackingDep,
    run_id: RunIdParameter,
) -> TypedResponse[responses.RunAnswer]:
    with tracking.read() as reader:
        [text] = run_texts(tracking, reader, [tracking.runs.get(run_id, connection=reader)])
    return mlflow_response(run=text)


@router.post("/update", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def update(body: UpdateRun, tracking: TrackingDep) -> TypedResponse[responses.RunInfoAnswer]:
    status = status_from_mlflow(body.status) if body.status else None
    changed = tracking.runs.update(body.run_id, status=status, end_time=body.end_time, name=body.run_name)
    return mlflow_response(run_info=info_message(changed))


@router.post("/delete", Permission.EXPERIMENTS_DELETE)
def delete(body: OfRun, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.runs.delete(body.run_id)
    return mlflow_response()


@router.post("/restore", Permission.EXPERIMENTS_DELETE)
def restore(body: OfRun, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.runs.restore(body.run_id)
    return mlflow_response()


@router.post("/search", Permission.EXPERIMENTS_READ, read_only=True, fast_path=FastSearch())
def search(body: SearchRuns, tracking: TrackingDep, caller: CallerDep) -> TypedResponse[responses.RunsAnswer]:
    with tracking.read() as reader:
        page = tracking.run_search.find(
            [experiment_number(text) for text in body.experiment_ids],
            conditions=translate_status_conditions(parse_filter(body.filter, RUN_GRAMMAR)),
            orders=parse_orders(body.order_by, RUN_GRAMMAR),
            lifecycle_stages=VIEWS[body.run_view_type],
            limit=body.max_results,
            page_token=body.page_token or None,
            organization=caller.organization,
            connection=reader,
        )
        found = run_texts(tracking, reader, page.runs)
    return mlflow_response(runs=found, next_page_token=page.next_page_token)
