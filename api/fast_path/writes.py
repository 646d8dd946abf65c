"""Calls that log: a body that is plain goes to the writer, with the count of the call, and is answered after its commit."""

from contextlib import nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.call import Call
from api.fast_path.middleware import HotCall, caller, is_json, whole_body, with_body
from api.hot.bodies import Decode, log_batch, log_metric, log_parameter, set_tag
from resources.metadata.call_tallies import tally_of
from resources.metadata.writes.run_writer import RunWriter

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
