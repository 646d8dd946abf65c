"""Send response head and body in one system call; accept websockets at one path.

uvicorn writes them separately and uvloop flushes each write, which costs a second packet and wakes the client twice, for the
two-byte response to a logged metric.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.dagster_ui.websocket_proxy import SOCKET_PATH

RAW_SOCKET_PATH = SOCKET_PATH.encode()


class CoalescingHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol over a coalescing transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CoalescingTransport(transport, self.loop))

    def _should_upgrade(self) -> bool:
        # Called only for requests with an Upgrade header. On other paths the header is ignored.
        return self.url.partition(b"?")[0] == RAW_SOCKET_PATH and super()._should_upgrade()

    def handle_websocket_upgrade(self) -> None:
        assert isinstance(self.transport, CoalescingTransport)
        self.transport = self.transport.detach()
        super().handle_websocket_upgrade()


class CoalescingTransport(asyncio.Transport):
    """Holds one write until the next, at most for one turn of the event loop.

    It implements only what an HTTP protocol uses.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._pending: Any = None

    def write(self, data: Any) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            self._pending = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.writelines([pending, data])

    def detach(self) -> asyncio.Transport:
        """Flush, then return the underlying transport for another protocol."""
        self._flush()
        return self._transport

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def _flush(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not self._transport.is_closing():
            self._transport.write(pending)
