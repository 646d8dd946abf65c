"""A uvicorn server that serves for a while after SIGTERM."""

import logging
import signal
import time
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn

log = logging.getLogger(__name__)

CLOSE = (b"connection", b"close")


class DrainingServer(uvicorn.Server):
    """Accepts requests for a while after SIGTERM, and asks clients to close their connections.

    Kubernetes removes a pod from its Service at the same time as it sends the signal, and proxies learn of it later. A
    client that keeps its connection open would otherwise write a request to it while the server closes it. SIGINT or a
    second SIGTERM ends the wait.

    Args:
        drain_seconds: 0 shuts down at once.
        on_drain: called once, when the shutdown begins.
    """

    def __init__(
        self, config: uvicorn.Config, drain_seconds: float, on_drain: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        super().__init__(config)
        self._drain_seconds = drain_seconds
        self._on_drain = on_drain
        self._stop_at: float | None = None
        self._is_draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGTERM and self._drain_seconds and self._stop_at is None:
            self._stop_at = time.monotonic() + self._drain_seconds
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        is_stopping = self._stop_at is not None or self.should_exit
        if is_stopping and not self._is_draining:
            self._is_draining = True
            if not self.should_exit:
                log.info("shutting down: requests are accepted for %.0f s more", self._drain_seconds)
            self.config.encoded_headers.append(CLOSE)  # headers of every response, in use from uvicorn's next second on
            self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
            if self._on_drain is not None:
                await self._on_drain()
        return await super().on_tick(counter) or (self._stop_at is not None and time.monotonic() >= self._stop_at)
