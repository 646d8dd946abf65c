"""A web server that replaces Dagster's: it records requests, and responds as configured."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import uvicorn


@dataclass
class Received:
    """A received request; the messages of a websocket are in `messages`."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes = b""
    messages: list[Any] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class DagsterRecorder:
    """Serves on a free loopback port.

    It describes `runs`, and responds to every other GraphQL request with `answer`.
    """

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.runs: list[dict[str, Any]] = []
        self.answer: Any = {"data": {"version": "1.13"}}
        self.cancelled_streams = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            ws="websockets-sansio",
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        method = scope.get("method", "websocket")
        received = Received(method, scope["path"], scope["query_string"].decode(), headers)
        self.received.append(received)
        if scope["type"] == "websocket":
            await self._socket_app(received, scope, receive, send)
            return
        received.body = await read(receive)
        if scope["path"] == "/dagster/logs/endless":
            await self._stream(receive, send)
        elif scope["path"] == "/dagster/redirect":
            place = f"{self.url}/dagster/assets".encode()
            await respond(send, b"", status=307, headers=[(b"location", place)])
        elif scope["path"] == "/dagster/graphql" and b"DescribeRuns" in received.body:
            await respond(send, json.dumps({"data": {"runsOrError": {"results": self.runs}}}).encode())
        elif scope["path"] == "/dagster/graphql":
            await respond(send, json.dumps(self.answer).encode())
        else:
            await respond(send, b"<html>Dagster</html>", headers=[(b"set-cookie", b"a=b"), (b"etag", b"1")])

    async def _socket_app(self, received: Received, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept", "subprotocol": scope["subprotocols"][0]})
        while (message := await receive())["type"] == "websocket.receive":
            document = json.loads(message["text"])
            received.messages.append(document)
            if document["type"] == "connection_init":
                await send({"type": "websocket.send", "text": '{"type": "connection_ack"}'})
            elif document["type"] in ("start", "subscribe"):
                update = {"type": "data", "id": document["id"], "payload": {"data": {"logs": 1}}}
                await send({"type": "websocket.send", "text": json.dumps(update)})
            elif document["type"] == "connection_terminate":
                await send({"type": "websocket.close", "code": 1000})
        received.messages.append("closed")

    async def _stream(self, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"line\n" * 1000, "more_body": True})
            await asyncio.sleep(0.01)
        self.cancelled_streams += 1


async def read(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def respond(send: Any, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers or []})
    await send({"type": "http.response.body", "body": body})
