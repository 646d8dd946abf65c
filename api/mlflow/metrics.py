"""Metrics over MLflow's API: one at a time, in batches with params and tags, and their history."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from api.dependencies import TrackingOf
from api.mlflow.bodies import MetricBody, Tag
from api.mlflow.messages import answer, metric_message
from api.mlflow.runs import OfRun
from api.requests import StrictRoute
from resources.errors import invalid
from resources.metadata.tracking_rules import MAX_INT64

MAX_BATCH_BYTES = 1_000_000
MAX_HISTORY = 25_000

router = APIRouter(prefix="/mlflow", tags=["mlflow"], route_class=StrictRoute)


class LogMetric(OfRun, MetricBody):
    pass


class LogBatch(OfRun):
    metrics: tuple[MetricBody, ...] = ()
    params: tuple[Tag, ...] = ()
    tags: tuple[Tag, ...] = ()


async def batch_size(request: Request) -> None:
    size = len(await request.body())
    if size > MAX_BATCH_BYTES:
        raise invalid(f"Batched logging API requests must be at most {MAX_BATCH_BYTES} bytes, got a request of size {size}.")


@router.post("/runs/log-metric")
def log_metric(body: LogMetric, tracking: TrackingOf) -> Response:
    tracking.run_data.log_metric(body.run_id, body.point())
    return answer()


@router.post("/runs/log-batch", dependencies=[Depends(batch_size)])
def log_batch(body: LogBatch, tracking: TrackingOf) -> Response:
    tracking.run_data.log_batch(
        body.run_id,
        [metric.point(f"metrics[{index}]") for index, metric in enumerate(body.metrics)],
        [(param.key, param.value) for param in body.params],
        [(tag.key, tag.value) for tag in body.tags],
    )
    return answer()


@router.get("/metrics/get-history")
def get_history(
    tracking: TrackingOf,
    metric_key: str,
    run_id: Annotated[str | None, Query()] = None,
    run_uuid: Annotated[str | None, Query()] = None,
    page_token: str = "",
    max_results: Annotated[int | None, Query(ge=1, le=MAX_HISTORY)] = None,
) -> Response:
    """The whole history unless `max_results` asks for pages."""
    named = run_id or run_uuid
    if not named:
        raise invalid("Missing value for required parameter 'run_id'.")
    tracking.runs.get(named)
    page = tracking.metrics.history(named, metric_key, max_results or MAX_INT64 - 1, page_token or None)
    return answer(metrics=[metric_message(point) for point in page.points], next_page_token=page.next_page_token)
