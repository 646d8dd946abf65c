"""Bodies of the hot calls: JSON to a `RunWrite` in microseconds, or None for what the comfortable route must judge.

Whatever is accepted here is accepted there, and means the same; what is odd (an alias, a number written as text) or wrong in
any way is left to it, so that there is one set of messages. tests/api/test_hot_calls.py holds the two together.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from api.routes.mlflow.metrics import MAX_BATCH_BYTES
from resources.errors import HanzoError
from resources.metadata.tracking_rules import MAX_INT64, check_key, metric_point
from resources.metadata.writes.run_writes import Points, RunWrite, write_of_points

Decode = Callable[[bytes, str | None], RunWrite | None]
"""A body, and the organization that its sender is limited to."""
Sent = TypeVar("Sent", "LogMetric", "LogBatch", "PairOfRun")

NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class Body(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A message of which every member is named here, also those that clients send and that mean nothing.

    Among others there may be another spelling of a name (`api.strict_json.proto_fields`).
    """


class Metric(Body):
    key: str
    value: float | str
    timestamp: Annotated[int, Meta(ge=0, le=MAX_INT64)]
    step: Annotated[int, Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)] = 0
    model_id: Literal[""] = ""
    """Metrics of a logged model have a second table, which may refuse one, and its neighbours with it."""
    dataset_name: str = ""
    dataset_digest: str = ""
    run_id: str = ""


class LogMetric(Metric, kw_only=True):
    run_id: str
    run_uuid: str = ""


class Pair(Body):
    key: str
    value: str = ""


class PairOfRun(Pair, kw_only=True):
    run_id: str
    run_uuid: str = ""


class LogBatch(Body):
    run_id: str
    metrics: list[Metric] = []
    params: list[Pair] = []
    tags: list[Pair] = []


class NotPlain(Exception):
    """The comfortable route must judge this body."""


_metric = msgspec.json.Decoder(LogMetric)
_batch = msgspec.json.Decoder(LogBatch)
_pair = msgspec.json.Decoder(PairOfRun)


def log_metric(body: bytes, organization: str | None) -> RunWrite | None:
    try:
        sent = _decoded(_metric, body)
        return write_of_points(sent.run_id, _points([sent]), organization=organization)
    except (HanzoError, NotPlain):
        return None


def log_batch(body: bytes, organization: str | None) -> RunWrite | None:
    if len(body) > MAX_BATCH_BYTES:
        return None
    try:
        sent = _decoded(_batch, body)
        params, tags = ([(pair.key, pair.value) for pair in pairs] for pairs in (sent.params, sent.tags))
        return write_of_points(sent.run_id, _points(sent.metrics), params, tags, organization)
    except (HanzoError, NotPlain):
        return None


def log_parameter(body: bytes, organization: str | None) -> RunWrite | None:
    try:
        sent = _decoded(_pair, body)
        return write_of_points(sent.run_id, {}, params=[(sent.key, sent.value)], organization=organization, batch=False)
    except (HanzoError, NotPlain):
        return None


def set_tag(body: bytes, organization: str | None) -> RunWrite | None:
    try:
        sent = _decoded(_pair, body)
        return write_of_points(sent.run_id, {}, tags=[(sent.key, sent.value)], organization=organization)
    except (HanzoError, NotPlain):
        return None


def _decoded(decoder: "msgspec.json.Decoder[Sent]", body: bytes) -> Sent:
    if b"\\u" in body:
        raise NotPlain
    try:
        sent = decoder.decode(body)
    except (ValueError, RecursionError):
        raise NotPlain from None
    if not sent.run_id:
        raise NotPlain
    return sent


def _points(metrics: Sequence[Metric]) -> Points:
    points: Points = {}
    for metric in metrics:
        key, value, is_nan = metric.key, metric.value, False
        if bool(metric.dataset_name) is not bool(metric.dataset_digest):
            raise NotPlain
        if isinstance(value, str):
            if value not in NUMBERS:
                raise NotPlain
            point = metric_point(key, NUMBERS[value], metric.step, metric.timestamp)
            value, is_nan = point.value, point.is_nan
        if key not in points:
            check_key(key, "Metric name", "")
            points[key] = []
        points[key].append((metric.step, metric.timestamp, value, is_nan))
    return points
