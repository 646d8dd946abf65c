"""Match requests to routes exactly as the application will.

Access control must decide about the route that will run, not one that looks similar, so it reads the application's own
routes in their order. A kind of route that it cannot read ends the start of the server.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.routing import Mount, compile_path

from api.fast_path.middleware import FastCall, FastPathResources
from api.routing import Declaration, find_declaration

UNMATCHED = "unmatched"


@dataclass(frozen=True)
class Route:
    """A route of the application; `shape` is method and template without parameter names.

    `declaration` is None for a route that was not declared (`api.routing`), which no caller may use.
    """

    method: str
    template: str
    shape: str
    pattern: re.Pattern[str]
    declaration: Declaration | None
    endpoint: Callable[..., Any] | None


@dataclass(frozen=True)
class Match:
    route: Route
    parameters: Mapping[str, str]


class Routes:
    """The routes of a complete application."""

    def __init__(self, app: FastAPI) -> None:
        self.all = list_routes(app)
        self._fixed: dict[tuple[str, str], Match] = {}
        by_method: dict[str, list[Route]] = {}
        for route in self.all:
            by_method.setdefault(route.method, []).append(route)
        for method, routes in by_method.items():
            for route in routes:
                # The match of a path without parameters is computed once and looked up.
                if "{" not in route.template and (found := first_match(routes, route.template)) is not None:
                    self._fixed[method, route.template] = found
        self._open = {method: [route for route in routes if "{" in route.template] for method, routes in by_method.items()}

    def match(self, method: str, path: str) -> Match | None:
        """Return the first route that matches the request; None without one."""
        return self._fixed.get((method, path)) or first_match(self._open.get(method, ()), path)

    def allowed_methods(self, path: str) -> list[str]:
        """List the methods that the routes at a path accept, for the `Allow` header."""
        methods = {method for method in self._open if self.match(method, path) is not None}
        return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def fast_calls(app: FastAPI, resources: FastPathResources) -> dict[tuple[str, str], FastCall]:
    """Return the fast path of every route that declares one, by method and path."""
    return {
        (route.method, route.template): route.declaration.fast_path.bind(route.endpoint, resources)
        for route in list_routes(app)
        if route.declaration is not None and route.declaration.fast_path is not None and route.endpoint is not None
    }


def shape(route: str) -> str:
    """Convert `GET /v1/jobs/{job_id}` to `GET /v1/jobs/{}`."""
    return re.sub(r"\{[^}]*\}", "{}", route)


def first_match(routes: Sequence[Route], path: str) -> Match | None:
    for route in routes:
        if found := route.pattern.match(path):
            return Match(route, found.groupdict())
    return None


def list_routes(app: FastAPI) -> list[Route]:
    """List every route, in the order of matching, with one entry per method."""
    routes: list[Route] = []
    for context in iter_route_contexts(app.routes):
        if isinstance(context.original_route, Mount):
            template, methods = f"{context.path}/{{path:path}}", {"GET", "HEAD"}
        elif context.path is None or not context.methods:
            raise TypeError(f"access control cannot read {context.original_route!r}: use a route with a path and methods")
        else:
            template, methods = context.path, context.methods
        pattern = compile_path(template)[0]
        for method in sorted(methods):
            # A HEAD request is answered by the GET route, so it requires the same permission.
            needs = "GET" if method == "HEAD" else method
            endpoint = getattr(context.original_route, "endpoint", None)
            declaration = find_declaration(app, context)
            routes.append(Route(method, template, shape(f"{needs} {template}"), pattern, declaration, endpoint))
    return routes
