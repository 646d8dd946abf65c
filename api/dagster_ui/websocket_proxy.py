"""Forward GraphQL subscriptions between a browser and Dagster's web server over websockets.

Access control has authenticated the handshake. The caller is authenticated again every `RECHECK_SECONDS`, so that an expired
or withdrawn token ends the connection. Messages to Dagster are parsed and serialized again; an unknown kind of message ends
the connection.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from api.auth.permissions import Caller
from api.dagster_ui.access import DagsterAccess
from api.dagster_ui.graphql_requests import read_request
from api.dagster_ui.http_proxy import CONNECT_SECONDS, UNAVAILABLE
from api.dagster_ui.policy import refusal
from resources.errors import ErrorCode, HanzoError
from resources.settings.sections import DAGSTER_PREFIX as PREFIX

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

log = logging.getLogger(__name__)

SOCKET_PATH = f"{PREFIX}/graphql"
SUBPROTOCOLS = ("graphql-ws", "graphql-transport-ws")
"""Of GraphQL over websockets, the older one first, which Dagster 1.13 speaks. Both are parsed alike."""
STARTS = ("start", "subscribe")
CONTROLS = ("connection_init", "connection_terminate", "stop", "complete", "ping", "pong")
RECHECK_SECONDS = 5.0
PING_SECONDS = 20.0
"""Pings to Dagster; a busy server may miss three before it counts as gone."""
MAX_CONNECTIONS = 200
"""Per worker; further ones are refused."""
MAX_MESSAGE_BYTES = 1 << 20
"""From a browser."""
MAX_UPDATE_BYTES = 16 << 20
"""From Dagster: the first message of a subscription holds a run's log."""
NORMAL, POLICY_VIOLATION, INTERNAL_ERROR = 1000, 1008, 1011
Authenticate = Callable[[], Awaitable[Caller]]


class UnexpectedMessage(Exception):
    """A message that is not forwarded and ends the connection."""


class DagsterSocket:
    """ASGI application of the websocket; `scope["state"]["authenticate"]` finds the caller, repeatedly."""

    def __init__(self, url: str, access: DagsterAccess) -> None:
        self._url = f"ws{url.rstrip('/').removeprefix('http')}{SOCKET_PATH}"
        self._access = access
        self._connections = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept and forward; raise HanzoError to refuse the handshake."""
        authenticate: Authenticate = scope["state"]["authenticate"]
        await self._access.check(await authenticate())
        offered = [name for name in scope.get("subprotocols", ()) if name in SUBPROTOCOLS]
        if not offered:
            raise HanzoError(ErrorCode.INVALID_PARAMETER_VALUE, f"Use one of the subprotocols {', '.join(SUBPROTOCOLS)}")
        if self._connections >= MAX_CONNECTIONS:
            raise HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, "Too many open pages of Dagster's UI: try again later")
        self._connections += 1
        try:
            dagster = await self._connect(offered)
            try:
                await self._forward(dagster, authenticate, receive, send)
            finally:
                await dagster.close()
        finally:
            self._connections -= 1

    async def _connect(self, offered: list[str]) -> "ClientConnection":
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        try:
            return await connect(
                self._url,
                subprotocols=offered,  # type: ignore[arg-type]  # a NewType of str
                user_agent_header=None,
                compression=None,
                open_timeout=CONNECT_SECONDS,
                close_timeout=1,
                ping_interval=PING_SECONDS,
                ping_timeout=3 * PING_SECONDS,
                max_size=MAX_UPDATE_BYTES,
                proxy=None,
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            log.warning("Dagster's web server at %s opens no websocket: %s", self._url, type(error).__name__)
            raise HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, UNAVAILABLE) from None

    async def _forward(self, dagster: "ClientConnection", authenticate: Authenticate, receive: Receive, send: Send) -> None:
        """Forward messages in both directions until one side, or the caller's token, ends it."""
        await receive()  # websocket.connect
        await send({"type": "websocket.accept", "subprotocol": dagster.subprotocol})
        tasks = [
            asyncio.create_task(forward_requests(dagster, receive, send, authenticate)),
            asyncio.create_task(forward_updates(dagster, send)),
            asyncio.create_task(self._await_expiry(authenticate)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if tasks[0] in done and tasks[0].exception() is None:
            return  # the client has closed it
        code, reason = close_reason(next(iter(done)))
        with suppress(Exception):  # the client may have disconnected meanwhile
            await send({"type": "websocket.close", "code": code, "reason": reason})

    async def _await_expiry(self, authenticate: Authenticate) -> None:
        """Wait until the caller may no longer be connected, then raise HanzoError."""
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            await self._access.check(await authenticate())


def close_reason(ended: "asyncio.Task[None]") -> tuple[int, str]:
    error = ended.exception()
    if isinstance(error, HanzoError):
        return POLICY_VIOLATION, error.message[:100]
    if isinstance(error, UnexpectedMessage):
        return POLICY_VIOLATION, str(error)[:100]
    if error is not None:
        log.warning("a websocket of Dagster's UI ended with %s", type(error).__name__)
        return INTERNAL_ERROR, "the connection to Dagster failed"
    return NORMAL, "Dagster closed the connection"


async def forward_requests(dagster: "ClientConnection", receive: Receive, send: Send, authenticate: Authenticate) -> None:
    """Forward messages of the browser until it closes the connection."""
    while True:
        message = await receive()
        if message["type"] != "websocket.receive":
            return
        text = message.get("text")
        if text is None:
            raise UnexpectedMessage("binary messages are not supported")
        document = decode(text)
        problem, forwarded = await run_in_threadpool(read_message, document, await authenticate())
        if problem is not None:
            await send({"type": "websocket.send", "text": json.dumps(error_message(document, problem))})
        else:
            await dagster.send(json.dumps(forwarded))


async def forward_updates(dagster: "ClientConnection", send: Send) -> None:
    """Forward messages of Dagster unchanged until it closes the connection."""
    from websockets.exceptions import ConnectionClosed

    with suppress(ConnectionClosed):
        while True:
            await send({"type": "websocket.send", "text": await dagster.recv(decode=True)})


def decode(text: str) -> Mapping[str, Any]:
    if len(text) > MAX_MESSAGE_BYTES:
        raise UnexpectedMessage("the message is too long")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise UnexpectedMessage("the message is not JSON") from None
    if not isinstance(document, dict):
        raise UnexpectedMessage("the message is not a JSON object")
    return document


def read_message(document: Mapping[str, Any], caller: Caller) -> tuple[str | None, dict[str, Any]]:
    """Return why a message is refused (or None), and the message to forward.

    Credentials in `connection_init` are not forwarded.

    Raises:
        UnexpectedMessage: it is of an unknown kind.
    """
    kind, number = document.get("type"), document.get("id")
    if number is not None and not isinstance(number, str):
        raise UnexpectedMessage("the id of a message must be a string")
    envelope: dict[str, Any] = {"type": kind} | ({"id": number} if number is not None else {})
    if kind in CONTROLS:
        return None, envelope
    if kind not in STARTS:
        raise UnexpectedMessage("the type of a message is unknown")
    try:
        request = read_request(document.get("payload"))
    except HanzoError as error:
        return error.message, {}
    problem = refusal(caller, request, allows_mutations=False)
    # Dagster 1.13 reads `operation_name`. All operations of a document are checked, whichever is selected.
    content = {**request.content, "operation_name": request.operation_name}
    return problem, {**envelope, "payload": content}


def error_message(document: Mapping[str, Any], problem: str) -> dict[str, Any]:
    """Return the refusal of one operation: an error or a list of errors, by subprotocol."""
    error = {"message": problem}
    return {"type": "error", "id": document.get("id"), "payload": error if document.get("type") == "start" else [error]}
