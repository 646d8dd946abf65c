"""Bodies of the hot calls: JSON to a `RunWrite` in microseconds, or None for what the comfortable route must judge.

Whatever is accepted here is accepted there, and means the same; what is odd (an alias, a number written as text) or wrong in
any way is left to it, so that there is one set of messages. tests/api/test_hot_calls.py holds the two together.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from api.mlflow.metrics import MAX_BATCH_BYTES
from resources.errors import HanzoError
from resources.metadata.tracking_rules import MetricPoint, metric_point
from resources.metadata.writes.run_writes import RunWrite, run_write

Decode = Callable[[bytes, str | None], RunWrite | None]
"""A body, and the organization that its sender is limited to."""
Sent = TypeVar("Sent", "LogMetric", "LogBatch", "PairOfRun")

OTHER_SPELLINGS = (b'"runId"', b'"runUuid"', b'"modelId"')
"""Of the names that say what is written (`api.requests.proto_fields`)."""
NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class Metric(msgspec.Struct, gc=False):
    key: str
    value: float | str
    timestamp: int
    step: int = 0
    model_id: str = ""
    dataset_name: str = ""
    dataset_digest: str = ""


class LogMetric(Metric, kw_only=True, gc=False):
    run_id: str


class Pair(msgspec.Struct, gc=False):
    key: str
    value: str = ""


class PairOfRun(Pair, kw_only=True, gc=False):
    run_id: str


class LogBatch(msgspec.Struct):
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
        return run_write(sent.run_id, [_point(sent)], organization=organization)
    except (HanzoError, NotPlain):
        return None


def log_batch(body: bytes, organization: str | None) -> RunWrite | None:
    if len(body) > MAX_BATCH_BYTES:
        return None
    try:
        sent = _decoded(_batch, body)
        points = [_point(metric) for metric in sent.metrics]
        params = [(pair.key, pair.value) for pair in sent.params]
        return run_write(sent.run_id, points, params, [(pair.key, pair.value) for pair in sent.tags], organization)
    except (HanzoError, NotPlain):
        return None


def log_parameter(body: bytes, organization: str | None) -> RunWrite | None:
    try:
        sent = _decoded(_pair, body)
        return run_write(sent.run_id, params=[(sent.key, sent.value)], organization=organization)
    except (HanzoError, NotPlain):
        return None


def set_tag(body: bytes, organization: str | None) -> RunWrite | None:
    try:
        sent = _decoded(_pair, body)
        return run_write(sent.run_id, tags=[(sent.key, sent.value)], organization=organization)
    except (HanzoError, NotPlain):
        return None


def _decoded(decoder: "msgspec.json.Decoder[Sent]", body: bytes) -> Sent:
    # msgspec skips unknown members without a look at their characters, which must be valid all the same.
    if b"\\u" in body or any(name in body for name in OTHER_SPELLINGS):
        raise NotPlain
    try:
        if not body.isascii():
            body.decode()
        sent = decoder.decode(body)
    except (ValueError, RecursionError):
        raise NotPlain from None
    if not sent.run_id:
        raise NotPlain
    return sent


def _point(metric: Metric) -> MetricPoint:
    """Not for a metric of a logged model: it has a second table, which may refuse it, and its neighbours with it."""
    value = metric.value
    if isinstance(value, str):
        if value not in NUMBERS:
            raise NotPlain
        value = NUMBERS[value]
    if metric.model_id:
        raise NotPlain
    return metric_point(metric.key, value, metric.step, metric.timestamp)
