"""Read request headers; limit, read, parse and resend request bodies."""

from collections.abc import Iterable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

from api.json_bodies import parse_json, with_proto_names
from resources.errors import invalid

# Read request headers from the scope without building a `Headers` object: most lookups find nothing.


def header(scope: Scope, wanted: bytes) -> bytes | None:
    """Return the first header with a lower-case name; None without one."""
    for name, value in scope["headers"]:
        if name == wanted:
            return bytes(value)
    return None


# Limit, read and resend request bodies: access control reads those that name objects.


def too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"The request body is too large: at most {limit} bytes")


def declared_length(scope: Scope) -> int | None:
    """Return the announced length; None for a streamed body. The server enforces it."""
    length = header(scope, b"content-length")
    if length is not None and length.isdigit():
        return int(length[:20])
    return None if header(scope, b"transfer-encoding") is not None else 0


def limit_body(receive: Receive, limit: int) -> Receive:
    """Raise a 413 once a body of unknown length exceeds the limit."""
    received = 0

    async def receive_counted() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise too_large(limit)
        return message

    return receive_counted


async def read_body(receive: Receive) -> bytes:
    """Return the whole body."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise invalid("The connection was closed before the request was complete")
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


def resend_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body again, then further messages of the client."""
    is_sent = False

    async def receive_body() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body


MLFLOW_PATH = "mlflow"
"""Part of every path whose body is a message of MLflow's protocol (runs, models, multipart artifacts)."""


def parse_body(body: bytes, path: str) -> Any:
    """Parse the JSON body of a request to `path`; None without one.

    A body that cannot be parsed is refused here: an endpoint with another parser must not find unchecked objects.
    """
    if not body:
        return None
    try:
        found = parse_json(body)
    except (ValueError, RecursionError) as error:
        raise invalid(f"Malformed JSON in the request body: {str(error)[:200]}") from None
    return with_proto_names(found) if MLFLOW_PATH in path else found


def with_content_length(headers: Iterable[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(length).encode())]
