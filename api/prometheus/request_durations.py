"""How long requests take, by route (rows V4, V6)."""

import mmap
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.route_matching import UNMATCHED, Routes

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper ends in seconds; one more bucket has no end."""
CELLS_PER_ENDPOINT = len(BUCKETS) + 2
"""Of an endpoint: the calls in each bucket, and the sum of their seconds."""
BUCKET_LABELS = [*map(floatToGoString, BUCKETS), "+Inf"]


class RequestHistogram(Collector):
    """Seconds by endpoint. Make it before the workers are forked; each calls `count_as` with its index first."""

    def __init__(self, endpoints: Iterable[str], workers: int) -> None:
        self._offsets = {endpoint: index * CELLS_PER_ENDPOINT for index, endpoint in enumerate(sorted(set(endpoints)))}
        self._size = len(self._offsets) * CELLS_PER_ENDPOINT
        self._cells = memoryview(mmap.mmap(-1, workers * self._size * 8)).cast("d")
        self._worker_cells = self._cells[: self._size]

    def count_as(self, worker: int) -> None:
        """Count for this worker from now on: one process at a time may, and one thread of it."""
        self._worker_cells = self._cells[worker * self._size : (worker + 1) * self._size]

    def observe(self, endpoint: str, seconds: float) -> None:
        start = self._offsets[endpoint]
        self._worker_cells[start + bisect_left(BUCKETS, seconds)] += 1
        self._worker_cells[start + CELLS_PER_ENDPOINT - 1] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The endpoints that were called."""
        family = HistogramMetricFamily(
            "hanzo_ml_api_request_duration_seconds",
            "Time until an answer begins, by the template of its route",
            labels=["endpoint"],
        )
        for endpoint, start in self._offsets.items():
            parts = [self._cells[first : first + CELLS_PER_ENDPOINT] for first in range(start, len(self._cells), self._size)]
            *counts, total = (sum(cells) for cells in zip(*parts, strict=True))
            if any(counts):
                family.add_metric([endpoint], list(zip(BUCKET_LABELS, accumulate(counts), strict=True)), total)
        yield family


class RequestTiming:
    """ASGI middleware: observes the time until the answer begins, because a log that is followed never ends."""

    def __init__(self, app: ASGIApp, routes: Routes, histogram: RequestHistogram) -> None:
        self._app = app
        self._routes = routes
        self._histogram = histogram

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                match = self._routes.match(scope["method"], scope["path"])
                # HEAD is answered by the route of GET (`request_normalization`).
                if match is None and scope["method"] == "HEAD":
                    match = self._routes.match("GET", scope["path"])
                endpoint = match.route.template if match else UNMATCHED
                self._histogram.observe(endpoint, time.perf_counter() - started)
            await send(message)

        await self._app(scope, receive, timed)
