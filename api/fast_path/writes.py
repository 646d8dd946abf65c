"""Calls that log: a body that is plain goes to the writer, with the count of the call, and is answered after its commit."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.audit_log import Call
from api.fast_path.middleware import HotCall, caller, is_json, whole_body, with_body
from api.routes.mlflow.metrics import MAX_BATCH_BYTES
from resources.errors import HanzoError
from resources.metadata.call_tallies import tally_of
from resources.metadata.tracking_rules import MAX_INT64, check_key, metric_point
from resources.metadata.writes.run_writer import RunWriter
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


CALLS: dict[str, Decode] = {
    "/mlflow/runs/log-metric": log_metric,
    "/mlflow/runs/log-batch": log_batch,
    "/mlflow/runs/log-parameter": log_parameter,
    "/mlflow/runs/set-tag": set_tag,
}

_OK = 200
_HEADERS = [(b"content-length", b"2"), (b"content-type", b"application/json")]
_BODY: Message = {"type": "http.response.body", "body": b"{}"}


class HotWrite:
    def __init__(self, decode: Decode, writer: RunWriter) -> None:
        self._decode = decode
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, others: ASGIApp) -> ASGIApp | None:
        if not is_json(scope):
            return others
        first = await receive()  # whoever sends nothing holds up nobody
        # Nor does whoever sends a part, but those whose bodies come in parts too.
        async with self._writer.arriving if first.get("more_body", False) else nullcontext():
            body = await whole_body(first, receive)
            if body is None:
                return None
            async with self._writer.room:
                write = self._decode(body, caller(scope).organization)
                if write is not None:
                    call: Call = scope["state"]["call"]
                    scope["state"]["run_id"] = write.run_id
                    await self._writer.store(write.counted_in(tally_of(call.audited(_OK))))
                    call.is_counted = True
                    return _stored
        return with_body(body, others)


async def _stored(_: Scope, __: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": _OK, "headers": _HEADERS})
    await send(_BODY)


def hot_writes(prefixes: tuple[str, ...], writer: RunWriter) -> dict[tuple[str, str], HotCall]:
    return {("POST", prefix + path): HotWrite(decode, writer) for prefix in prefixes for path, decode in CALLS.items()}
