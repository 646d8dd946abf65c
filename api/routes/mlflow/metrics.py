"""Metric histories: of one run, and of many runs at once, sampled for charts."""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from fastapi import Query
from fastapi.responses import StreamingResponse

from api.auth.permissions import Permission
from api.dependencies import TrackingDep
from api.fast_path.reads import RUN, Arguments, FastQuery, parse_fields, with_run_id
from api.json_bodies import TypedResponse
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import Required, RunIdParameter, metric_message, mlflow_response
from api.schemas.mlflow.runs import point_messages
from resources.errors import invalid
from resources.metadata.field_rules import MAX_INT64
from resources.metadata.tracking.metrics import HistoryPage, Metrics, RunPoint, StepRange

MAX_HISTORY = 25_000
"""Largest page, sorted as a whole; later points are read while they are sent."""
STREAMED_POINTS = 5000
"""How many of the later points are read and sent at once."""

router = Router("/mlflow", tag="mlflow")


def parse_history(query: str) -> Arguments | None:
    """Return the arguments of `get_history`; None if the route must handle the query."""
    given = with_run_id(parse_fields(query, RUN | {"metric_key", "page_token", "max_results"}, may_be_empty={"page_token"}))
    if given is None or "metric_key" not in given:
        return None
    limit = given.pop("max_results", "")
    if limit and not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_HISTORY):
        return None
    return {**given, "max_results": int(limit) if limit else None}


@router.get("/metrics/get-history", Permission.EXPERIMENTS_READ, allows_jobs=True, fast_path=FastQuery(parse_history))
def get_history(
    tracking: TrackingDep,
    metric_key: Required,
    run_id: RunIdParameter,
    page_token: str = "",
    max_results: Annotated[int | None, Query(ge=1)] = None,
) -> TypedResponse[responses.HistoryAnswer] | StreamingResponse:
    """Return the whole history, or a page of `max_results`.

    It is empty for an unknown run, as in MLflow.
    """
    limit = min(max_results or MAX_HISTORY, MAX_HISTORY)
    first = tracking.metrics.history(run_id, metric_key, limit, page_token or None)
    if max_results is not None or first.next_page_token is None:
        return mlflow_response(metrics=point_messages(first.points), next_page_token=first.next_page_token)
    return StreamingResponse(whole_history(tracking.metrics, run_id, metric_key, first), media_type="application/json")


def whole_history(metrics: Metrics, run_id: str, key: str, page: HistoryPage) -> Iterator[bytes]:
    """Stream the JSON of a history page by page, in constant memory."""
    yield b'{"metrics":['
    while True:
        yield msgspec.json.encode(point_messages(page.points))[1:-1]
        if page.next_page_token is None:
            break
        yield b","
        page = metrics.history(run_id, key, STREAMED_POINTS, page.next_page_token)
    yield b"]}"


MAX_RUNS = 100
MAX_POINTS_PER_RUN = 2500
MAX_POINTS = 25_000

Step = Annotated[int, Query(ge=-MAX_INT64 - 1, le=MAX_INT64)]


@router.get("/metrics/get-history-bulk-interval", Permission.EXPERIMENTS_READ)
def get_history_bulk_interval(
    tracking: TrackingDep,
    metric_key: Required,
    run_ids: Annotated[tuple[str, ...], Query()] = (),
    start_step: Step | None = None,
    end_step: Step | None = None,
    max_results: int = MAX_POINTS_PER_RUN,
) -> TypedResponse[responses.HistoryOfRunsAnswer]:
    """Return at most `max_results` points of each run; none of unknown runs."""
    if not run_ids:
        raise invalid("Missing value for required parameter 'run_ids'.")
    check_count("GetMetricHistoryBulkInterval request must specify at most", len(run_ids))
    if not 1 <= max_results <= MAX_POINTS_PER_RUN:
        raise invalid(f"max_results must be between 1 and {MAX_POINTS_PER_RUN}.")
    steps = step_interval(start_step, end_step)
    points = tracking.metric_sampling.sample(run_ids, metric_key, max_results, steps)
    return mlflow_response(metrics=[point_message(found) for found in points])


@router.get("/metrics/get-history-bulk", Permission.EXPERIMENTS_READ)
def get_history_bulk(
    tracking: TrackingDep,
    run_id: Annotated[tuple[str, ...], Query()] = (),
    metric_key: str | None = None,
    max_results: Annotated[int, Query(ge=1)] = MAX_POINTS,
) -> TypedResponse[responses.HistoryOfRunsAnswer]:
    """Return the first points of all runs together, for MLflow before 2.3."""
    if not run_id:
        raise invalid("GetMetricHistoryBulk request must specify at least one run_id.")
    check_count("GetMetricHistoryBulk request cannot specify more than", len(run_id))
    if metric_key is None:
        raise invalid("GetMetricHistoryBulk request must specify a metric_key.")
    points = tracking.metric_sampling.first_points(run_id, metric_key, min(max_results, MAX_POINTS))
    return mlflow_response(metrics=[point_message(found) for found in points])


def check_count(refusal: str, runs: int) -> None:
    if runs > MAX_RUNS:
        raise invalid(f"{refusal} {MAX_RUNS} run_ids. Received {runs} run_ids.")


def step_interval(start: int | None, end: int | None) -> StepRange | None:
    if start is None and end is None:
        return None
    if start is None or end is None:
        raise invalid("If either start step or end step are specified, both must be specified.")
    if start > end:
        raise invalid(f"end_step must be greater than start_step. Found start_step={start} and end_step={end}.")
    return StepRange(start, end)


def point_message(found: RunPoint) -> dict[str, Any]:
    return {**metric_message(found.point), "run_id": found.run_id}
