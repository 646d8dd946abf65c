"""Forward requests of OpenAI's API unchanged to the backend of their model.

A request that a dying backend did not answer is retried, so that a crash causes a delay and no error.
"""

import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from urllib.parse import quote

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from tenacity import AsyncRetrying, retry_if_exception_type

from recipes.storage.retry import after_pauses
from resources.errors import BadRequest, EngineError, EngineUnavailable
from resources.serving.client import Served
from resources.serving.deployment_table import DeploymentTable

PAUSES_SECONDS = (0.1, 0.1, 0.1)
"""Pauses before retries: a dying process closes its sockets a moment before it counts as dead, so that an immediate retry
would reach it again."""


async def forward_request(request: Request, table: DeploymentTable, http: httpx.AsyncClient) -> Response:
    """Answer one request of OpenAI's API.

    Raises:
        EngineError: the requested model is not served, or its backend failed at every attempt.
    """
    body = await request.body()
    model = requested_model(body)

    name = ""

    async def answer() -> Response:
        nonlocal name
        served, backend = await table.route(model)
        name = served.name
        with ExitStack() as counted:
            # No await between choosing the backend and counting the request: a swap cannot end the backend in between.
            address = counted.enter_context(backend.counting_request())
            outgoing = http.build_request(
                "POST", address + request.url.path, content=body, headers={"Content-Type": "application/json"}
            )
            response = await send_request(http, outgoing)
            if response.headers.get("Content-Type", "").startswith("text/event-stream"):
                return StreamedAnswer(response, counted.pop_all(), answer_headers(response, served))
            content = await response.aread()
            return Response(content, response.status_code, answer_headers(response, served))

    retrying = AsyncRetrying(retry=retry_if_exception_type(httpx.TransportError), **after_pauses(*PAUSES_SECONDS))
    try:
        return await retrying(answer)
    except httpx.TransportError:
        attempts = len(PAUSES_SECONDS) + 1
        raise EngineUnavailable(f"the backend of '{name}' failed {attempts} times: retry later") from None


async def send_request(http: httpx.AsyncClient, outgoing: httpx.Request) -> httpx.Response:
    """Send a request and return once the response starts.

    Raises:
        httpx.TransportError: the backend closed the connection.
    """
    try:
        return await http.send(outgoing, stream=True)
    except AttributeError as error:
        # anyio 4 reads the peer name of a connection that was closed immediately after connecting, and finds no socket.
        raise httpx.ConnectError(f"the connection was closed as it was made: {error}", request=outgoing) from error


class StreamedAnswer(StreamingResponse):
    """Streamed response, in flight until it is sent or the client has disconnected."""

    def __init__(self, response: httpx.Response, counted: ExitStack, headers: dict[str, str]) -> None:
        super().__init__(answer_chunks(response), response.status_code, headers)
        self._response = response
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._counted.close()
            await self._response.aclose()


async def answer_chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the backend's chunks.

    A failure is reported as an event with an error, because the status has already been sent.
    """
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    except httpx.TransportError:
        error = EngineUnavailable("the backend failed during this response: retry the request")
        yield b"data: " + json.dumps(openai_error(error)).encode() + b"\n\n"


def requested_model(body: bytes) -> str | None:
    """Return the model that a request names."""
    try:
        document = json.loads(body)
    except ValueError:
        raise BadRequest("the body is not valid JSON") from None
    if not isinstance(document, dict):
        raise BadRequest("the body is not a JSON object")
    model = document.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("the field 'model' is not a string")
    return model or None


def answer_headers(response: httpx.Response, served: Served) -> dict[str, str]:
    """Return headers with the content type and the weights that answered."""
    return {
        "Content-Type": response.headers.get("Content-Type", "application/json"),
        "X-Hanzo-Model": quote(served.name, safe="/%"),
        "X-Hanzo-Model-Version": str(served.version),
        "X-Hanzo-Model-SHA256": served.sha256,
    }


def openai_error(error: EngineError) -> dict[str, dict[str, str | None]]:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code.value}}


def openai_response(error: EngineError) -> JSONResponse:
    return JSONResponse(openai_error(error), error.status)
