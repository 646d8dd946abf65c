"""Answer simple calls of frequent routes without FastAPI; pass every other request on.

Routes declare their fast path (`api.routing`): `FastWrite` (`run_logging`), `FastQuery` and `FastSearch` (`reads`). Unusual
requests are left to the route, so that rules and messages exist only once.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.permissions import Caller
from api.errors import response_to_error
from api.middleware.request_body import header
from resources.errors import ErrorCode, HanzoError
from resources.metadata.tracking.tracking import Tracking
from resources.metadata.writes.group_commit import RunWriter

BODY_SECONDS = 60
"""Limit for a body of at most a megabyte: a partial body occupies memory that other writers wait for."""


class FastCall(Protocol):
    """Finds the response to a request.

    Returns `route` if the route must handle it (`with_body` of it if the body was read already), or None if the client
    disconnected.
    """

    async def __call__(self, scope: Scope, receive: Receive, route: ASGIApp) -> ASGIApp | None: ...


@dataclass(frozen=True)
class FastPathResources:
    """Objects that the fast calls of an application share."""

    tracking: Tracking
    writer: RunWriter
    threads: Executor


class FastPath(Protocol):
    """The fast path of a declared route."""

    def bind(self, endpoint: Callable[..., Any], resources: FastPathResources) -> FastCall: ...


class FastPathMiddleware:
    """Innermost ASGI middleware; access control runs before it, or leaves ownership to the call.

    Args:
        calls: by method and path.
    """

    def __init__(self, app: ASGIApp, calls: Mapping[tuple[str, str], FastCall]) -> None:
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._calls.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if call is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await call(scope, receive, self._app)
        except Exception as error:
            response = response_to_error(error, Request(scope))
        if response is not None:
            await response(scope, receive, send)


def caller(scope: Scope) -> Caller:
    found: Caller = scope["state"]["caller"]
    return found


def is_json(scope: Scope) -> bool:
    value = header(scope, b"content-type") or b""
    return value == b"application/json" or value.startswith(b"application/json;")


async def whole_body(message: Message, receive: Receive) -> bytes | None:
    """Return the body after its first message; None if the client disconnected.

    Raises:
        HanzoError: the rest does not arrive in time.
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
        problem = f"The rest of the request did not arrive within {BODY_SECONDS} s: send it again"
        raise HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, problem) from None
    return b"".join(parts)


def with_body(body: bytes, route: ASGIApp) -> ASGIApp:
    """Return `route` for a request whose body was already read."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def call_route(scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_again() -> Message:
            return waiting.pop() if waiting else await receive()

        await route(scope, receive_again, send)

    return call_route
