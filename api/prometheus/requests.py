"""How long requests take, by route (rows V4, V6)."""

import time

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.routes import UNMATCHED, Routes

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def request_histogram(registry: CollectorRegistry) -> Histogram:
    # One more name for each series that nobody asked for, and that the specification does not have.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    return Histogram(
        "hanzo_ml_api_request_duration_seconds",
        "Time until an answer begins, by the template of its route",
        ["endpoint"],
        registry=registry,
        buckets=BUCKETS,
    )


class RequestTimes:
    """ASGI middleware: observes the time until the answer begins, because a log that is followed never ends."""

    def __init__(self, app: ASGIApp, routes: Routes, histogram: Histogram) -> None:
        self._app = app
        self._routes = routes
        self._histogram = histogram
        self._children: dict[str, Histogram] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                match = self._routes.match(scope["method"], scope["path"])
                self._of(match.route.template if match else UNMATCHED).observe(time.perf_counter() - started)
            await send(message)

        await self._app(scope, receive, timed)

    def _of(self, endpoint: str) -> Histogram:
        child = self._children.get(endpoint)
        if child is None:
            child = self._children[endpoint] = self._histogram.labels(endpoint)
        return child
