"""Calls that read, of which a page of a dashboard or a client makes many: what is plain calls the endpoint itself, in a
thread, without the two thirds of the time that FastAPI takes to find out with which arguments.

The endpoint makes the answer either way. tests/api/test_hot_reads.py holds the two ways together.
"""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qsl

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope

from api.auth.permissions import Caller
from api.fast_path.middleware import HotCall, caller, is_json, whole_body, with_body
from api.middleware.request_headers import header
from api.routes.mlflow import experiments, metrics, runs
from api.strict_json import Body, json_of
from resources.metadata.tracking.tracking import Tracking

Answer = Callable[[], Response]
FromQuery = Callable[[Tracking, Caller, str], Answer | None]
FromBody = Callable[[Tracking, Caller, bytes], Answer | None]
"""The endpoint with its arguments, or None for what the comfortable route must judge."""
Sent = TypeVar("Sent", bound=Body)

RUN = frozenset({"run_id", "run_uuid"})
HISTORY = RUN | {"metric_key", "page_token", "max_results"}


def get_run(tracking: Tracking, _: Caller, query: str) -> Answer | None:
    given = of_run(fields(query, RUN))
    return partial(runs.get, tracking, **given) if given else None


def get_experiment(tracking: Tracking, _: Caller, query: str) -> Answer | None:
    given = fields(query, {"experiment_id"})
    return partial(experiments.get, tracking=tracking, **given) if given else None


def find_experiment(tracking: Tracking, asking: Caller, query: str) -> Answer | None:
    given = fields(query, {"experiment_name"})
    return partial(experiments.get_by_name, tracking=tracking, caller=asking, **given) if given else None


def get_history(tracking: Tracking, _: Caller, query: str) -> Answer | None:
    given = of_run(fields(query, HISTORY, may_be_empty={"page_token"}))
    if given is None or "metric_key" not in given:
        return None
    limit = given.pop("max_results", "")
    if limit and not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= metrics.MAX_HISTORY):
        return None
    history = partial(metrics.get_history, tracking, max_results=int(limit) if limit else None)
    return partial(history, **given)


def search_runs(tracking: Tracking, asking: Caller, body: bytes) -> Answer | None:
    sent = decoded(runs.SearchRuns, body)
    return partial(runs.search, sent, tracking, asking) if sent else None


def search_experiments(tracking: Tracking, asking: Caller, body: bytes) -> Answer | None:
    sent = decoded(experiments.SearchExperiments, body)
    return partial(experiments.search, sent, tracking, asking) if sent else None


BY_QUERY: dict[str, FromQuery] = {
    "/mlflow/runs/get": get_run,
    "/mlflow/experiments/get": get_experiment,
    "/mlflow/experiments/get-by-name": find_experiment,
    "/mlflow/metrics/get-history": get_history,
}
BY_BODY: dict[str, FromBody] = {
    "/mlflow/runs/search": search_runs,
    "/mlflow/experiments/search": search_experiments,
}


class HotQuery:
    """A GET whose query says all."""

    def __init__(self, ask: FromQuery, tracking: Tracking, threads: Executor) -> None:
        self._ask = partial(ask, tracking)
        self._threads = threads

    async def __call__(self, scope: Scope, receive: Receive, others: ASGIApp) -> ASGIApp | None:
        answer = None
        if not has_body(scope):
            answer = self._ask(caller(scope), scope["query_string"].decode("latin-1"))
        if answer is None:
            return others
        return await asyncio.get_running_loop().run_in_executor(self._threads, answer)


class HotSearch:
    """A POST whose JSON body says all."""

    def __init__(self, ask: FromBody, tracking: Tracking, threads: Executor) -> None:
        self._ask = partial(ask, tracking)
        self._threads = threads

    async def __call__(self, scope: Scope, receive: Receive, others: ASGIApp) -> ASGIApp | None:
        if not is_json(scope):
            return others
        body = await whole_body(await receive(), receive)
        if body is None:
            return None
        answer = self._ask(caller(scope), body)
        if answer is None:
            return with_body(body, others)
        return await asyncio.get_running_loop().run_in_executor(self._threads, answer)


def hot_reads(prefixes: tuple[str, ...], tracking: Tracking, threads: Executor) -> dict[tuple[str, str], HotCall]:
    calls: dict[tuple[str, str], HotCall] = {}
    for prefix in prefixes:
        calls |= {("GET", prefix + path): HotQuery(ask, tracking, threads) for path, ask in BY_QUERY.items()}
        calls |= {("POST", prefix + path): HotSearch(ask, tracking, threads) for path, ask in BY_BODY.items()}
    return calls


def has_body(scope: Scope) -> bool:
    """Whether the request may have one: some clients send JSON with GET."""
    return header(scope, b"content-length") not in (None, b"", b"0") or header(scope, b"transfer-encoding") is not None


def of_run(given: dict[str, str] | None) -> dict[str, str] | None:
    """Arguments with the run by the one name that endpoints have for it; None where there is no run."""
    if given is None:
        return None
    rest = {name: text for name, text in given.items() if name not in RUN}
    named = given.get("run_id") or given.get("run_uuid")
    return {**rest, "run_id": named} if named else None


def fields(query: str, known: Collection[str], may_be_empty: Collection[str] = ()) -> dict[str, str] | None:
    """The parameters of a query that names at least one, each once, none that is unknown and none that is empty."""
    pairs = parse_qsl(query, keep_blank_values=True)
    given = dict(pairs)
    if not given or len(given) != len(pairs) or not given.keys() <= set(known):
        return None
    return given if all(value or name in may_be_empty for name, value in pairs) else None


def decoded(model: type[Sent], body: bytes) -> Sent | None:
    """The body as the comfortable route reads it, or None where it would refuse it."""
    try:
        return model.model_validate(json_of(body))
    except (ValueError, RecursionError):
        return None
