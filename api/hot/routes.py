"""Routes in front of all others: a body that is plain goes to the writer, any other on to the route of the same path."""

from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.hot.bodies import Decode, log_batch, log_metric, log_parameter, set_tag
from resources.metadata.run_writer import RunWriter

CALLS: dict[str, Decode] = {
    "/mlflow/runs/log-metric": log_metric,
    "/mlflow/runs/log-batch": log_batch,
    "/mlflow/runs/log-parameter": log_parameter,
    "/mlflow/runs/set-tag": set_tag,
}
NOT_PLAIN = "api.hot.not_plain"
"""In the scope of a request that was passed on: it must not come back."""

_HEAD: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-length", b"2"), (b"content-type", b"application/json")],
}
_BODY: Message = {"type": "http.response.body", "body": b"{}"}


class HotRoute(Route):
    """One path. `others` is the router that it stands in, which goes on where this route passes."""

    def __init__(self, path: str, decode: Decode, writer: RunWriter, others: ASGIApp) -> None:
        super().__init__(path, _never, methods=["POST"], include_in_schema=False)
        self._decode = decode
        self._writer = writer
        self._others = others

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and scope["path"] == self.path and scope["method"] == "POST" and NOT_PLAIN not in scope:
            return Match.FULL, {"endpoint": self.endpoint, "path_params": {}}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_json(scope):
            return await self._others({**scope, NOT_PLAIN: True}, receive, send)
        async with self._writer.room:
            body = await whole_body(receive)
            if body is None:
                return None
            write = self._decode(body, organization(scope))
            if write is not None:
                scope["state"]["run_id"] = write.run_id
                await self._writer.store(write)
                await send(_HEAD)
                return await send(_BODY)
        return await self._others({**scope, NOT_PLAIN: True}, sent_again(body, receive), send)


def hot_routes(prefixes: tuple[str, ...], writer: RunWriter, others: ASGIApp) -> list[HotRoute]:
    return [HotRoute(prefix + path, decode, writer, others) for prefix in prefixes for path, decode in CALLS.items()]


def organization(scope: Scope) -> str:
    """The caller's: a run of another one does not exist for them."""
    own: str = scope["state"]["caller"].organization
    return own


def is_json(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-type":
            return bool(value == b"application/json" or value.startswith(b"application/json;"))
    return False


async def whole_body(receive: Receive) -> bytes | None:
    """The body of a request, or None where the client went away."""
    message = await receive()
    if message["type"] != "http.request":
        return None
    if not message.get("more_body", False):
        return bytes(message["body"])
    parts = [message["body"]]
    while message.get("more_body", False):
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message["body"])
    return b"".join(parts)


def sent_again(body: bytes, receive: Receive) -> Receive:
    """What to receive where `body` was received already."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


async def _never(_: Request) -> None:
    raise AssertionError("HotRoute.handle answers")
