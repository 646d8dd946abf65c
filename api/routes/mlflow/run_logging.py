"""Data that training scripts log to a run: log-metric, log-batch, log-parameter, set-tag and delete-tag.

Simple calls of the first four take the fast path (`api.fast_path.run_logging`) and never get here.
"""

import math
from typing import Annotated, Any

from fastapi import Depends, Request
from pydantic import BeforeValidator

from api.auth.ownership import require_own_run
from api.auth.permissions import Permission
from api.dependencies import TrackingDep
from api.fast_path.run_logging import FastWrite, decode_log_batch, decode_log_metric, decode_log_parameter, decode_set_tag
from api.json_bodies import TypedResponse
from api.routing import Audit, Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import MAX_BATCH_BYTES, MetricBody, OfRun, Required, Tag, mlflow_response
from resources.errors import invalid

router = Router("/mlflow", tag="mlflow")


class LogMetric(MetricBody, OfRun):
    """One point of a metric of a run."""


def number_as_text(value: Any) -> Any:
    """Format a number as JSON does; return any other value unchanged, for validation."""
    if isinstance(value, float):
        return str(value) if math.isfinite(value) else value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class Pair(Tag):
    """A param or tag of a batch; FastTrackML accepts numbers as values.

    MLflow's server stores an empty text instead.
    """

    key: Required
    value: Annotated[str, BeforeValidator(number_as_text)] = ""


class LogBatch(OfRun):
    metrics: tuple[MetricBody, ...] = ()
    params: tuple[Pair, ...] = ()
    tags: tuple[Pair, ...] = ()


class KeyOfRun(OfRun):
    key: Required


class LogParam(KeyOfRun):
    value: str = ""


class SetTag(KeyOfRun):
    value: str = ""


async def check_batch_size(request: Request) -> None:
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
    dependencies=[Depends(require_own_run)],
)
def log_metric(body: LogMetric, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.run_data.log_metric(body.run_id, body.point())
    return mlflow_response()


@router.post(
    "/runs/log-batch",
    Permission.EXPERIMENTS_WRITE,
    audit=Audit.COUNTED,
    allows_jobs=True,
    checks_ownership=True,
    fast_path=FastWrite(decode_log_batch),
    dependencies=[Depends(check_batch_size), Depends(require_own_run)],
)
def log_batch(body: LogBatch, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.run_data.log_batch(
        body.run_id,
        [metric.point(f"metrics[{index}]") for index, metric in enumerate(body.metrics)],
        [(param.key, param.value) for param in body.params],
        [(tag.key, tag.value) for tag in body.tags],
    )
    return mlflow_response()


@router.post(
    "/runs/log-parameter",
    Permission.EXPERIMENTS_WRITE,
    audit=Audit.COUNTED,
    allows_jobs=True,
    checks_ownership=True,
    fast_path=FastWrite(decode_log_parameter),
    dependencies=[Depends(require_own_run)],
)
def log_parameter(body: LogParam, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.run_data.log_param(body.run_id, body.key, body.value)
    return mlflow_response()


@router.post(
    "/runs/set-tag",
    Permission.EXPERIMENTS_WRITE,
    audit=Audit.COUNTED,
    allows_jobs=True,
    checks_ownership=True,
    fast_path=FastWrite(decode_set_tag),
    dependencies=[Depends(require_own_run)],
)
def set_tag(body: SetTag, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.run_data.set_tag(body.run_id, body.key, body.value)
    return mlflow_response()


@router.post("/runs/delete-tag", Permission.EXPERIMENTS_WRITE, audit=Audit.COUNTED, allows_jobs=True)
def delete_tag(body: KeyOfRun, tracking: TrackingDep) -> TypedResponse[responses.NothingAnswer]:
    tracking.run_data.delete_tag(body.run_id, body.key)
    return mlflow_response()
