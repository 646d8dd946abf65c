"""Metrics over MLflow's API: one at a time, in batches with params and tags, and their history."""

import math
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BeforeValidator

from api.auth.ownership import own_run
from api.auth.permissions import Permission
from api.dependencies import TrackingOf
from api.fast_path.reads import RUN, Arguments, FastQuery, parse_fields, with_run_id
from api.fast_path.writes import FastWrite, decode_log_batch, decode_log_metric
from api.responses import TypedResponse
from api.routing import Audit, Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import answer
from api.schemas.mlflow.requests import MAX_BATCH_BYTES, MetricBody, NamedRun, OfRun, Required, Tag
from api.schemas.mlflow.runs import point_messages
from resources.errors import invalid
from resources.metadata.tracking.metrics import HistoryPage, Metrics

MAX_HISTORY = 25_000
"""Points of the largest page. As many are put in order as a whole; what follows is read as it is sent."""
CHUNK = 5000
"""Points of what follows that are read and sent at once."""

router = Router("/mlflow", tag="mlflow")


class LogMetric(MetricBody, OfRun):
    """One point of a run."""


def as_text(value: Any) -> Any:
    """A number as the text that JSON has for it; what is neither text nor a number is left to be refused."""
    if isinstance(value, float):
        return str(value) if math.isfinite(value) else value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class Pair(Tag):
    """In a batch a number is a value too, as FastTrackML takes it. MLflow's server keeps an empty text in its place."""

    key: Required
    value: Annotated[str, BeforeValidator(as_text)] = ""


class LogBatch(OfRun):
    metrics: tuple[MetricBody, ...] = ()
    params: tuple[Pair, ...] = ()
    tags: tuple[Pair, ...] = ()


async def batch_size(request: Request) -> None:
    size = len(await request.body())
    if size > MAX_BATCH_BYTES:
        raise invalid(f"Batched logging API requests must be at most {MAX_BATCH_BYTES} bytes, got a request of size {size}.")


@router.post(
    "/runs/log-metric",
    Permission.EXPERIMENTS_WRITE,
    audit=Audit.COUNTED,
    allows_jobs=True,
    checks_ownership=True,
    fast_path=FastWrite(decode_log_metric),
    dependencies=[Depends(own_run)],
)
def log_metric(body: LogMetric, tracking: TrackingOf) -> TypedResponse[responses.NothingAnswer]:
    tracking.run_data.log_metric(body.run_id, body.point())
    return answer()


@router.post(
    "/runs/log-batch",
    Permission.EXPERIMENTS_WRITE,
    audit=Audit.COUNTED,
    allows_jobs=True,
    checks_ownership=True,
    fast_path=FastWrite(decode_log_batch),
    dependencies=[Depends(batch_size), Depends(own_run)],
)
def log_batch(body: LogBatch, tracking: TrackingOf) -> TypedResponse[responses.NothingAnswer]:
    tracking.run_data.log_batch(
        body.run_id,
        [metric.point(f"metrics[{index}]") for index, metric in enumerate(body.metrics)],
        [(param.key, param.value) for param in body.params],
        [(tag.key, tag.value) for tag in body.tags],
    )
    return answer()


def parse_history(query: str) -> Arguments | None:
    """Arguments of `get_history`; None where the route must judge."""
    given = with_run_id(parse_fields(query, RUN | {"metric_key", "page_token", "max_results"}, may_be_empty={"page_token"}))
    if given is None or "metric_key" not in given:
        return None
    limit = given.pop("max_results", "")
    if limit and not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_HISTORY):
        return None
    return {**given, "max_results": int(limit) if limit else None}


@router.get("/metrics/get-history", Permission.EXPERIMENTS_READ, allows_jobs=True, fast_path=FastQuery(parse_history))
def get_history(
    tracking: TrackingOf,
    metric_key: Required,
    run_id: NamedRun,
    page_token: str = "",
    max_results: Annotated[int | None, Query(ge=1)] = None,
) -> TypedResponse[responses.HistoryAnswer] | StreamingResponse:
    """The whole history unless `max_results` asks for pages; none where nobody knows the run, as in MLflow."""
    limit = min(max_results or MAX_HISTORY, MAX_HISTORY)
    first = tracking.metrics.history(run_id, metric_key, limit, page_token or None)
    if max_results is not None or first.next_page_token is None:
        return answer(metrics=point_messages(first.points), next_page_token=first.next_page_token)
    return StreamingResponse(whole_history(tracking.metrics, run_id, metric_key, first), media_type="application/json")


def whole_history(metrics: Metrics, run_id: str, key: str, page: HistoryPage) -> Iterator[bytes]:
    """The JSON of a history from its first page on, page by page: as much memory for a long one as for a short one."""
    yield b'{"metrics":['
    while True:
        yield msgspec.json.encode(point_messages(page.points))[1:-1]
        if page.next_page_token is None:
            break
        yield b","
        page = metrics.history(run_id, key, CHUNK, page.next_page_token)
    yield b"]}"
