"""Fast path of logging calls: queue a simple body, and answer after its commit.

The call's audit count is written in the same transaction. Bodies are decoded to a `RunWrite` in microseconds. What is
accepted here is also accepted by the route, with the same meaning; unusual bodies (an alias, a number as text) and invalid
ones are left to the route, so that messages exist only once. tests/api/fast_path/test_fast_run_logging.py checks that both
agree.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.audit_log import Call
from api.fast_path.middleware import FastCall, FastPathResources, caller, is_json, whole_body, with_body
from api.schemas.mlflow.messages import MAX_BATCH_BYTES
from resources.errors import HanzoError
from resources.metadata.audit_log import make_tally
from resources.metadata.field_rules import MAX_INT64, check_key, metric_point
from resources.metadata.writes.group_commit import RunWriter
from resources.metadata.writes.write_decisions import Points, RunWrite, run_write_from_points

Decode = Callable[[bytes, str | None], RunWrite | None]
"""Decodes a body, for the organization to which its sender is limited."""
LoggingBody = TypeVar("LoggingBody", "LogMetric", "LogBatch", "RunPair")

NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class Body(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A message that declares every member, also meaningless ones that clients send.

    An undeclared member could be another spelling of a name (`api.json_bodies.proto_fields`).
    """


class Metric(Body):
    key: str
    value: float | str
    timestamp: Annotated[int, Meta(ge=0, le=MAX_INT64)]
    step: Annotated[int, Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)] = 0
    model_id: Literal[""] = ""
    """Metrics of a logged model go to a second table, which may refuse one and with it the whole batch."""
    dataset_name: str = ""
    dataset_digest: str = ""
    run_id: str = ""


class LogMetric(Metric, kw_only=True):
    run_id: str
    run_uuid: str = ""


class Pair(Body):
    key: str
    value: str = ""


class RunPair(Pair, kw_only=True):
    run_id: str
    run_uuid: str = ""


class LogBatch(Body):
    run_id: str
    metrics: list[Metric] = []
    params: list[Pair] = []
    tags: list[Pair] = []


class NotPlain(Exception):
    """The route must handle this body."""


_metric = msgspec.json.Decoder(LogMetric)
_batch = msgspec.json.Decoder(LogBatch)
_pair = msgspec.json.Decoder(RunPair)


def decode_log_metric(body: bytes, organization: str | None) -> RunWrite | None:
    try:
        sent = _decoded(_metric, body)
        return run_write_from_points(sent.run_id, _points([sent]), organization=organization)
    except (HanzoError, NotPlain):
        return None


def decode_log_batch(body: bytes, organization: str | None) -> RunWrite | None:
    if len(body) > MAX_BATCH_BYTES:
        return None
    try:
        sent = _decoded(_batch, body)
        params, tags = ([(pair.key, pair.value) for pair in pairs] for pairs in (sent.params, sent.tags))
        return run_write_from_points(sent.run_id, _points(sent.metrics), params, tags, organization)
    except (HanzoError, NotPlain):
        return None


def decode_log_parameter(body: bytes, organization: str | None) -> RunWrite | None:
    try:
        sent = _decoded(_pair, body)
        return run_write_from_points(
            sent.run_id, {}, params=[(sent.key, sent.value)], organization=organization, batch=False
        )
    except (HanzoError, NotPlain):
        return None


def decode_set_tag(body: bytes, organization: str | None) -> RunWrite | None:
    try:
        sent = _decoded(_pair, body)
        return run_write_from_points(sent.run_id, {}, tags=[(sent.key, sent.value)], organization=organization)
    except (HanzoError, NotPlain):
        return None


def _decoded(decoder: "msgspec.json.Decoder[LoggingBody]", body: bytes) -> LoggingBody:
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


_OK = 200
_HEADERS = [(b"content-length", b"2"), (b"content-type", b"application/json")]
_BODY: Message = {"type": "http.response.body", "body": b"{}"}


@dataclass(frozen=True)
class FastWrite:
    """A logging call whose body `decode` parses."""

    decode: Decode

    def bind(self, endpoint: Callable[..., Any], resources: FastPathResources) -> FastCall:
        return WriteCall(self.decode, resources.writer)


class WriteCall:
    def __init__(self, decode: Decode, writer: RunWriter) -> None:
        self._decode = decode
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, route: ASGIApp) -> ASGIApp | None:
        if not is_json(scope):
            return route
        first = await receive()  # a client that sends nothing blocks no other
        # A client that has sent a part of its body blocks only others with partial bodies.
        async with self._writer.arriving if first.get("more_body", False) else nullcontext():
            body = await whole_body(first, receive)
            if body is None:
                return None
            async with self._writer.slots:
                write = self._decode(body, caller(scope).organization)
                if write is not None:
                    call: Call = scope["state"]["call"]
                    scope["state"]["run_id"] = write.run_id
                    await self._writer.store(write.with_tally(make_tally(call.audit_row(_OK))))
                    call.is_counted = True
                    return _respond_stored
        return with_body(body, route)


async def _respond_stored(_: Scope, __: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": _OK, "headers": _HEADERS})
    await send(_BODY)
