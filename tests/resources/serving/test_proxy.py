"""Proxy errors: a broken backend connection is distinguished from an internal error."""

import asyncio

import httpx
import pytest

from resources.serving.proxy import send_request


class ClosedAsItWasMade(httpx.AsyncBaseTransport):
    """Fail as anyio does.

    Seen when a backend was killed between accepting a connection and its first byte.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        socket = None
        return httpx.Response(200, text=socket.getpeername())  # type: ignore[attr-defined]


def test_connection_closed_during_setup_is_a_transport_error() -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(transport=ClosedAsItWasMade()) as http:
            await send_request(http, http.build_request("POST", "http://backend/v1/completions"))

    with pytest.raises(httpx.TransportError, match="closed as it was made"):
        asyncio.run(ask())
