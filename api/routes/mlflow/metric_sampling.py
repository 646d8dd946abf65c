"""Histories of many runs at once, sampled for charts: what MLflow's web UI draws."""

from typing import Annotated, Any

from fastapi import Query

from api.auth.permissions import Permission
from api.dependencies import TrackingOf
from api.responses import TypedResponse
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import answer, metric_message
from api.schemas.mlflow.requests import Required
from resources.errors import invalid
from resources.metadata.tracking.metric_sampling import PointOfRun, Steps
from resources.metadata.tracking_rules import MAX_INT64

MAX_RUNS = 100
MAX_POINTS_OF_RUN = 2500
MAX_POINTS = 25_000

Step = Annotated[int, Query(ge=-MAX_INT64 - 1, le=MAX_INT64)]

router = Router("/mlflow/metrics", tag="mlflow")


@router.get("/get-history-bulk-interval", Permission.EXPERIMENTS_READ)
def get_history_bulk_interval(
    tracking: TrackingOf,
    metric_key: Required,
    run_ids: Annotated[tuple[str, ...], Query()] = (),
    start_step: Step | None = None,
    end_step: Step | None = None,
    max_results: int = MAX_POINTS_OF_RUN,
) -> TypedResponse[responses.HistoryOfRunsAnswer]:
    """At most `max_results` points of each run. Runs that nobody knows have none."""
    if not run_ids:
        raise invalid("Missing value for required parameter 'run_ids'.")
    check_count("GetMetricHistoryBulkInterval request must specify at most", len(run_ids))
    if not 1 <= max_results <= MAX_POINTS_OF_RUN:
        raise invalid(f"max_results must be between 1 and {MAX_POINTS_OF_RUN}.")
    steps = interval(start_step, end_step)
    points = tracking.metric_sampling.sample(run_ids, metric_key, max_results, steps)
    return answer(metrics=[point_message(found) for found in points])


@router.get("/get-history-bulk", Permission.EXPERIMENTS_READ)
def get_history_bulk(
    tracking: TrackingOf,
    run_id: Annotated[tuple[str, ...], Query()] = (),
    metric_key: str | None = None,
    max_results: Annotated[int, Query(ge=1)] = MAX_POINTS,
) -> TypedResponse[responses.HistoryOfRunsAnswer]:
    """The first points of all these runs together, as releases of MLflow before 2.3 asked for them."""
    if not run_id:
        raise invalid("GetMetricHistoryBulk request must specify at least one run_id.")
    check_count("GetMetricHistoryBulk request cannot specify more than", len(run_id))
    if metric_key is None:
        raise invalid("GetMetricHistoryBulk request must specify a metric_key.")
    points = tracking.metric_sampling.first_points(run_id, metric_key, min(max_results, MAX_POINTS))
    return answer(metrics=[point_message(found) for found in points])


def check_count(refusal: str, runs: int) -> None:
    if runs > MAX_RUNS:
        raise invalid(f"{refusal} {MAX_RUNS} run_ids. Received {runs} run_ids.")


def interval(start: int | None, end: int | None) -> Steps | None:
    if start is None and end is None:
        return None
    if start is None or end is None:
        raise invalid("If either start step or end step are specified, both must be specified.")
    if start > end:
        raise invalid(f"end_step must be greater than start_step. Found start_step={start} and end_step={end}.")
    return Steps(start, end)


def point_message(found: PointOfRun) -> dict[str, Any]:
    return {**metric_message(found.point), "run_id": found.run_id}
