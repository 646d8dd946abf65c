"""Calls that log: a body that is plain goes to the writer and is answered after its commit."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.hot.bodies import Decode, log_batch, log_metric, log_parameter, set_tag
from api.hot.routes import HotRoute, caller, is_json, sent_again, whole_body
from resources.metadata.run_writer import RunWriter

CALLS: dict[str, Decode] = {
    "/mlflow/runs/log-metric": log_metric,
    "/mlflow/runs/log-batch": log_batch,
    "/mlflow/runs/log-parameter": log_parameter,
    "/mlflow/runs/set-tag": set_tag,
}

_HEAD: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-length", b"2"), (b"content-type", b"application/json")],
}
_BODY: Message = {"type": "http.response.body", "body": b"{}"}


class HotWrite(HotRoute):
    def __init__(self, path: str, decode: Decode, writer: RunWriter, others: ASGIApp) -> None:
        super().__init__("POST", path, others)
        self._decode = decode
        self._writer = writer

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_json(scope):
            return await self.pass_on(scope, receive, send)
        async with self._writer.room:
            body = await whole_body(receive)
            if body is None:
                return None
            write = self._decode(body, caller(scope).organization)
            if write is not None:
                scope["state"]["run_id"] = write.run_id
                await self._writer.store(write)
                await send(_HEAD)
                return await send(_BODY)
        return await self.pass_on(scope, sent_again(body, receive), send)


def write_routes(prefixes: tuple[str, ...], writer: RunWriter, others: ASGIApp) -> list[HotWrite]:
    return [HotWrite(prefix + path, decode, writer, others) for prefix in prefixes for path, decode in CALLS.items()]
