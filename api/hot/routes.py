"""Routes in front of all others: what is plain is answered here, anything else goes on to the route of the same path."""

from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.permissions import Caller

NOT_PLAIN = "api.hot.not_plain"
"""In the scope of a request that was passed on: it must not come back."""


class HotRoute(Route):
    """One method of one path. `others` is the router that it stands in, which goes on where this route passes."""

    def __init__(self, method: str, path: str, others: ASGIApp) -> None:
        super().__init__(path, _never, methods=[method], include_in_schema=False)
        # Starlette would add HEAD to GET.
        self.methods = {method}
        self._method = method
        self._others = others

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if (
            scope["type"] == "http"
            and scope["path"] == self.path
            and scope["method"] == self._method
            and NOT_PLAIN not in scope
        ):
            return Match.FULL, {"endpoint": self.endpoint, "path_params": {}}
        return Match.NONE, {}

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._others({**scope, NOT_PLAIN: True}, receive, send)


def caller(scope: Scope) -> Caller:
    found: Caller = scope["state"]["caller"]
    return found


def is_json(scope: Scope) -> bool:
    value = header(scope, b"content-type")
    return value == b"application/json" or value.startswith(b"application/json;")


def header(scope: Scope, wanted: bytes) -> bytes:
    """The first header of that name, empty where there is none."""
    for name, value in scope["headers"]:
        if name == wanted:
            return bytes(value)
    return b""


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
