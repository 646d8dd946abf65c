"""Responses are sent in one packet, and coalescing delays nothing.

Neither a write that nothing follows, nor the end of a connection is held back.
"""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import uvloop

from api.coalesced_writes import CoalescingTransport
from tests.support.server_process import ServerProcess

DATA_SEGS_IN = 152
"""Offset in Linux's `struct tcp_info`."""


def packets(connection: socket.socket) -> int:
    """Count received packets that contain data."""
    [number] = struct.unpack_from("I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), DATA_SEGS_IN)
    return int(number)


@pytest.mark.parametrize("path", ["/health", "/api/2.0/mlflow/experiments/get?experiment_id=0", "/nowhere"])
def test_response_is_sent_in_one_packet(server: ServerProcess, path: str) -> None:
    connections: list[socket.socket] = []

    class Client(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            answer = super().handle_request(request)
            connections.append(answer.extensions["network_stream"].get_extra_info("socket"))
            return answer

    with httpx.Client(base_url=server.url, transport=Client()) as client:
        for number in range(1, 4):
            client.get(path)
            assert packets(connections[-1]) == number
        assert len(set(connections)) == 1


async def corked(serve: Callable[[CoalescingTransport, asyncio.Transport], Awaitable[None]]) -> bytes:
    """Return all that the other end of a connection receives.

    The event loop must have caught no exception.
    """
    loop = asyncio.get_running_loop()
    caught: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: caught.append(context))
    own, others = socket.socketpair()
    with others:
        others.setblocking(False)
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, own)
        await serve(CoalescingTransport(transport, loop), transport)
        parts = []
        async with asyncio.timeout(30):
            while part := await loop.sock_recv(others, 1000):
                parts.append(part)
    assert not caught
    return b"".join(parts)


def received(serve: Callable[[CoalescingTransport, asyncio.Transport], Awaitable[None]]) -> bytes:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(corked(serve))


@pytest.mark.parametrize("pieces", range(1, 6))
def test_writes_of_one_loop_iteration_arrive_complete_and_in_order(pieces: int) -> None:
    async def serve(cork: CoalescingTransport, transport: asyncio.Transport) -> None:
        for turn in range(3):
            for piece in range(pieces):
                cork.write(f"{turn}{piece} ".encode())
            await asyncio.sleep(0)
        cork.close()

    assert received(serve).decode().split() == [f"{turn}{piece}" for turn in range(3) for piece in range(pieces)]


def test_single_write_is_flushed_at_the_end_of_the_loop_iteration() -> None:
    async def serve(cork: CoalescingTransport, transport: asyncio.Transport) -> None:
        cork.write(b"alone")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        transport.close()  # not the coalescing transport, which would flush it

    assert received(serve) == b"alone"


def test_buffered_data_is_flushed_before_the_connection_closes() -> None:
    async def serve(cork: CoalescingTransport, transport: asyncio.Transport) -> None:
        cork.write(b"last")
        cork.close()
        assert cork.is_closing()

    assert received(serve) == b"last"


def test_write_to_a_lost_connection_is_ignored() -> None:
    async def serve(cork: CoalescingTransport, transport: asyncio.Transport) -> None:
        transport.abort()
        cork.write(b"too late")
        await asyncio.sleep(0)

    assert received(serve) == b""
