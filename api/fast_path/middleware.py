"""In front of all routes: a call that is plain is answered here, anything else goes on to the route of its path."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.permissions import Caller
from api.errors import answer_to
from api.middleware.request_headers import header
from resources.errors import ErrorCode, HanzoError

BODY_SECONDS = 60
"""For a megabyte at most: whoever logs waits for room, which a body takes that came in part."""


class HotCall(Protocol):
    """Finds what answers a request.

    That is `others` where the comfortable route must judge, `with_body` of it where the body was read, and None where the
    client went away.
    """

    async def __call__(self, scope: Scope, receive: Receive, others: ASGIApp) -> ASGIApp | None: ...


class HotCalls:
    """ASGI middleware, the innermost: whoever may not do it with what he names is refused before, or by the call.

    `calls` are known by method and path.
    """

    def __init__(self, app: ASGIApp, calls: Mapping[tuple[str, str], HotCall]) -> None:
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._calls.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if call is None:
            await self._app(scope, receive, send)
            return
        try:
            answer = await call(scope, receive, self._app)
        except Exception as error:
            answer = answer_to(error, Request(scope))
        if answer is not None:
            await answer(scope, receive, send)


def caller(scope: Scope) -> Caller:
    found: Caller = scope["state"]["caller"]
    return found


def is_json(scope: Scope) -> bool:
    value = header(scope, b"content-type") or b""
    return value == b"application/json" or value.startswith(b"application/json;")


async def whole_body(message: Message, receive: Receive) -> bytes | None:
    """The body of a request, whose first message was received; None where the client went away.

    Raises:
        HanzoError: its rest does not come.
    """
    if message["type"] != "http.request":
        return None
    if not message.get("more_body", False):
        return bytes(message["body"])
    parts = [message["body"]]
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while message.get("more_body", False):
                message = await receive()
                if message["type"] != "http.request":
                    return None
                parts.append(message["body"])
    except TimeoutError:
        told = f"The rest of the request did not come within {BODY_SECONDS} s: send it again"
        raise HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, told) from None
    return b"".join(parts)


def with_body(body: bytes, others: ASGIApp) -> ASGIApp:
    """`others` for a request whose body was received already."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        async def again() -> Message:
            return waiting.pop() if waiting else await receive()

        await others(scope, again, send)

    return answered
