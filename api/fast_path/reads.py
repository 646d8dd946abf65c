"""Fast path of frequent reads: call the endpoint in a thread, without FastAPI's argument resolution.

That resolution takes two thirds of the time of such a call. The endpoint creates the response either way, and
tests/api/fast_path/test_reads.py checks that both paths agree.
"""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Receive, Scope

from api.fast_path.middleware import FastCall, FastPathResources, caller, is_json, whole_body, with_body
from api.json_bodies import Body, parse_json
from api.middleware.request_body import header

Arguments = dict[str, Any]
ParseQuery = Callable[[str], Arguments | None]
"""Convert a query string to the endpoint's arguments; None if the route must handle it."""

RUN = frozenset({"run_id", "run_uuid"})


@dataclass(frozen=True)
class FastQuery:
    """A GET with all its arguments in the query."""

    parse: ParseQuery

    def bind(self, endpoint: Callable[..., Any], resources: FastPathResources) -> FastCall:
        return QueryCall(self.parse, EndpointInThread(endpoint, resources))


@dataclass(frozen=True)
class FastSearch:
    """A POST with all its arguments in the JSON body, the endpoint's `body`."""

    def bind(self, endpoint: Callable[..., Any], resources: FastPathResources) -> FastCall:
        return SearchCall(signature(endpoint).parameters["body"].annotation, EndpointInThread(endpoint, resources))


class EndpointInThread:
    """An endpoint that takes `tracking`, and possibly `caller`."""

    def __init__(self, endpoint: Callable[..., Any], resources: FastPathResources) -> None:
        self._endpoint = partial(endpoint, tracking=resources.tracking)
        self._takes_caller = "caller" in signature(endpoint).parameters
        self._threads: Executor = resources.threads

    async def __call__(self, scope: Scope, arguments: Arguments) -> ASGIApp:
        if self._takes_caller:
            arguments["caller"] = caller(scope)
        call = partial(self._endpoint, **arguments)
        response: ASGIApp = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        return response


class QueryCall:
    def __init__(self, parse: ParseQuery, endpoint: EndpointInThread) -> None:
        self._parse = parse
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, route: ASGIApp) -> ASGIApp | None:
        arguments = None if has_body(scope) else self._parse(scope["query_string"].decode("latin-1"))
        return route if arguments is None else await self._endpoint(scope, arguments)


class SearchCall:
    def __init__(self, model: type[Body], endpoint: EndpointInThread) -> None:
        self._model = model
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, route: ASGIApp) -> ASGIApp | None:
        if not is_json(scope):
            return route
        body = await whole_body(await receive(), receive)
        if body is None:
            return None
        sent = decode_body(self._model, body)
        return with_body(body, route) if sent is None else await self._endpoint(scope, {"body": sent})


def parse_run(query: str) -> Arguments | None:
    return with_run_id(parse_fields(query, RUN))


def has_body(scope: Scope) -> bool:
    """Return whether the request may have a body: some clients send JSON with GET."""
    return header(scope, b"content-length") not in (None, b"", b"0") or header(scope, b"transfer-encoding") is not None


def with_run_id(given: Arguments | None) -> Arguments | None:
    """Return the arguments with the run as `run_id`; None without a run."""
    if given is None:
        return None
    rest = {name: text for name, text in given.items() if name not in RUN}
    named = given.get("run_id") or given.get("run_uuid")
    return {**rest, "run_id": named} if named else None


def parse_fields(query: str, known: Collection[str], may_be_empty: Collection[str] = ()) -> Arguments | None:
    """Parse a non-empty query; None if a parameter is repeated, unknown or empty."""
    pairs = parse_qsl(query, keep_blank_values=True)
    given = dict(pairs)
    if not given or len(given) != len(pairs) or not given.keys() <= set(known):
        return None
    return given if all(value or name in may_be_empty for name, value in pairs) else None


def decode_body(model: type[Body], body: bytes) -> Body | None:
    """Parse the body as the route does; None if the route would refuse it."""
    try:
        return model.model_validate(parse_json(body))
    except (ValueError, RecursionError):
        return None
