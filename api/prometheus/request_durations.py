"""How long requests take, by route (rows V4, V6)."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.route_matching import UNMATCHED, Routes
from api.prometheus.request_histogram import RequestHistogram


class RequestTimes:
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
                if match is None and scope["method"] == "HEAD":  # the route of GET answers (`api.head`)
                    match = self._routes.match("GET", scope["path"])
                endpoint = match.route.template if match else UNMATCHED
                self._histogram.observe(endpoint, time.perf_counter() - started)
            await send(message)

        await self._app(scope, receive, timed)
