"""/dagster: Dagster's UI for signed-in users (`api.dagster_ui`).

Without `dagster.url`, Dagster's web server is another port of this machine, to which browsers are redirected.
"""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import URL
from starlette.exceptions import HTTPException

from api.auth.audit_log import AuditLog
from api.auth.permissions import Caller, Permission
from api.dagster_ui.access import DagsterAccess
from api.dagster_ui.graphql_requests import GraphQLRequest, read_request, values_by_key
from api.dagster_ui.http_proxy import DagsterServer, ForwardedResponse
from api.dagster_ui.policy import refusal, repeated_runs, run_refusal, terminated_runs
from api.dagster_ui.same_origin import is_from_browser, is_same_origin
from api.dependencies import CallerDep
from api.errors import error_response, no_such_route
from api.json_bodies import parse_json
from api.middleware.request_body import limit_body, read_body, too_large
from api.routing import Router
from recipes.contracts.frozen_model import UNSTORABLE_CHARACTERS
from resources.errors import HTTP_STATUS, ErrorCode, HanzoError, invalid
from resources.metadata.audit_log import AuditedCall
from resources.metadata.database import Database
from resources.metadata.ownership import ObjectKind, Reference, find_owners
from resources.settings.sections import DAGSTER_PREFIX as PREFIX
from resources.settings.settings import Settings

router = Router(strict=False, include_in_schema=False)

GRAPHQL = "graphql"
MAX_BODY_BYTES = 1 << 20
REPORT_PATHS = re.compile(r"report_asset_(materialization|check|observation)/[^/].*")
"""REST endpoints that write asset events into Dagster's history."""
UNSERVED_PATHS = re.compile(r"(dagit/)?notebook(/.*)?")
"""Dagster would render any notebook file as a page of this server, including its scripts."""
UNSAFE_PATH = re.compile(r"(^|/)\.{1,2}(/|$)|[\x00-\x1f\x7f\\]")
RECORDED_IDS = ("runId", "runIds", "parentRunId", "backfillId")
MAX_RECORDED_IDS = 50
UNAVAILABLE_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Dagster does not answer</title>
<body style="font-family:sans-serif;max-width:40em;margin:4em auto"><h1>Dagster does not answer</h1><p>{message}.</p>
<p><a href="">Try again</a></p></body></html>
"""


@dataclass(frozen=True)
class DagsterUI:
    """Objects that the routes share. `server` is None if Dagster is not behind this server."""

    access: DagsterAccess
    server: DagsterServer | None
    address: str
    database: Database
    audit_log: AuditLog

    async def close(self) -> None:
        if self.server is not None:
            await self.server.close()


def open_dagster_ui(settings: Settings, database: Database, audit_log: AuditLog) -> DagsterUI:
    """Create the shared objects; connects to nothing."""
    server = DagsterServer(settings.dagster.url) if settings.dagster.url else None
    return DagsterUI(DagsterAccess(settings, database), server, settings.dagster_url, database, audit_log)


def find_dagster_ui(app: FastAPI) -> DagsterUI:
    found: DagsterUI = app.state.dagster_ui
    return found


@router.get(PREFIX, Permission.SERVER_READ, checks_ownership=True)
async def start_page(request: Request, caller: CallerDep) -> Response:
    return await read("", request, caller)


@router.get(f"{PREFIX}/{{path:path}}", Permission.SERVER_READ, checks_ownership=True)
async def read(path: str, request: Request, caller: CallerDep) -> Response:
    """Serve pages, files, logs, and GraphQL queries."""
    ui = find_dagster_ui(request.app)
    try:
        await ui.access.check(caller)
        if UNSAFE_PATH.search(path) or UNSERVED_PATHS.fullmatch(path):
            raise no_such_route("GET", request.url.path)
        if ui.server is None:
            return RedirectResponse(str(URL(f"{ui.address}/{path}").replace(query=request.url.query)), 307)
        if request.url.path == PREFIX:
            return RedirectResponse(f"{PREFIX}/", 307)
        query = list(request.query_params.multi_items())
        if path == GRAPHQL:
            query = await read_graphql_query(request, caller)
        return ForwardedResponse(await ui.server.send("GET", path, request.headers, query=query))
    except HanzoError as error:
        return await refuse(ui, request, caller, error)


@router.post(f"{PREFIX}/{{path:path}}", Permission.SERVER_READ, read_only=True, checks_ownership=True)
async def write(path: str, request: Request, caller: CallerDep) -> Response:
    """Serve GraphQL, and Dagster's endpoints that report events.

    Access control accepts the cookie here, so the origin is checked.
    """
    ui = find_dagster_ui(request.app)
    try:
        await ui.access.check(caller)
        check_origin(request, caller)
        if ui.server is None:
            raise no_such_route("POST", request.url.path)
        if path == GRAPHQL:
            return await send_graphql(ui, ui.server, request, caller)
        if REPORT_PATHS.fullmatch(path) and not UNSAFE_PATH.search(path):
            return await report_event(ui, ui.server, path, request, caller)
        raise no_such_route("POST", request.url.path)
    except HanzoError as error:
        return await refuse(ui, request, caller, error)


def check_origin(request: Request, caller: Caller) -> None:
    """Refuse requests that a page of another site may have sent with the cookie.

    Raises:
        HanzoError: 403.
    """
    by_cookie = "authorization" not in request.headers and "cookie" in request.headers
    if (by_cookie or is_from_browser(request.headers)) and not is_same_origin(request.headers):
        message = "This request does not come from a page of this server: send a token as 'Authorization: Bearer TOKEN'"
        raise HanzoError(ErrorCode.PERMISSION_DENIED, message)


async def read_graphql_query(request: Request, caller: Caller) -> list[tuple[str, str]]:
    """Return the parameters of a GET query to forward; the GraphiQL page gets none."""
    if "text/html" in request.headers.get("accept", ""):
        return []
    given = request.query_params
    if len(set(given)) != len(given.multi_items()):
        raise invalid("Each parameter of a GraphQL query may be given once")
    asked = await run_in_threadpool(read_request, dict(given))
    if problem := refusal(caller, asked, allows_mutations=False):
        raise HanzoError(ErrorCode.PERMISSION_DENIED, problem)
    return [(name, given[name]) for name in ("query", "variables", "operationName") if name in given]


async def send_graphql(ui: DagsterUI, server: DagsterServer, request: Request, caller: Caller) -> Response:
    started = time.perf_counter()
    asked = await run_in_threadpool(read_request, await read_json_body(request))
    if not asked.has_mutation:
        return ForwardedResponse(await server.send("POST", GRAPHQL, request.headers, body=asked.content))
    problem = refusal(caller, asked) or await find_run_refusal(ui, server, asked, caller)
    if problem:
        await record(ui, request, caller, 403, started, objects=recorded_objects(asked))
        return mutation_refusal(problem, asked)
    status, document = 503, None
    try:
        # If the response breaks off, it is unknown what Dagster did: record the mutation regardless.
        status, document = await server.read_json(GRAPHQL, asked.content)
    finally:
        await record(ui, request, caller, status, started, objects=recorded_objects(asked, document))
    return JSONResponse(document, status)


async def find_run_refusal(ui: DagsterUI, server: DagsterServer, asked: GraphQLRequest, caller: Caller) -> str | None:
    """Return why the caller may not end or repeat the runs that a mutation names.

    Looks up the runs in Dagster, and the users of their jobs in the database.
    """
    run_ids = list(dict.fromkeys([*terminated_runs(asked), *repeated_runs(asked)]))
    if caller.is_admin or not run_ids:
        return None
    runs = await server.describe_runs(run_ids)
    jobs = {Reference(ObjectKind.JOB, job_id) for run in runs.values() for job_id in run.job_ids}

    def find_users() -> dict[str, str]:
        with ui.database.read() as connection:
            return {found.id: owner.user_id for found, owner in find_owners(connection, jobs, caller.organization).items()}

    return run_refusal(caller, asked, runs, await run_in_threadpool(find_users))


async def report_event(ui: DagsterUI, server: DagsterServer, path: str, request: Request, caller: Caller) -> Response:
    """Write an asset event into Dagster's history; requires ml-admin."""
    started = time.perf_counter()
    if not caller.is_admin:
        roles = ", ".join(sorted(caller.roles))
        message = f"Your role ({roles}) does not include reporting events of assets to Dagster: ask an ml-admin"
        raise HanzoError(ErrorCode.PERMISSION_DENIED, message)
    body = await read_json_body(request, optional=True)
    query = list(request.query_params.multi_items())
    response = await server.send("POST", path, request.headers, query=query, body=body)
    await record(ui, request, caller, response.status_code, started, objects=(f"asset event:{path}",))
    return ForwardedResponse(response)


async def read_json_body(request: Request, *, optional: bool = False) -> Any:
    """Return the body as JSON.

    Other content types are refused: a page of another site can send them without a preflight request.
    """
    try:
        body = await read_body(limit_body(request.receive, MAX_BODY_BYTES))
    except HTTPException:
        raise invalid(too_large(MAX_BODY_BYTES).detail) from None
    if optional and not body:
        return None
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise invalid("Content-Type must be application/json")
    try:
        return parse_json(body)
    except (ValueError, RecursionError) as error:
        raise invalid(f"Malformed JSON in the request body: {str(error)[:200]}") from None


async def refuse(ui: DagsterUI, request: Request, caller: Caller, error: HanzoError) -> Response:
    """Respond with a page, a GraphQL error or a JSON error, depending on the client."""
    if error.code is ErrorCode.PERMISSION_DENIED:
        await record(ui, request, caller, error.status, None)
    is_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
    if is_page and error.code is ErrorCode.TEMPORARILY_UNAVAILABLE:
        return HTMLResponse(UNAVAILABLE_PAGE.format(message=error.message), error.status)
    if not is_page and request.url.path == f"{PREFIX}/{GRAPHQL}":
        return graphql_refusal(error.message, error.code, error.status)
    return error_response(error.code, error.message)


def graphql_refusal(message: str, code: ErrorCode = ErrorCode.PERMISSION_DENIED, status: int = 403) -> Response:
    """Return an error in this server's format and in GraphQL's."""
    errors = [{"message": message, "extensions": {"error_code": code.value}}]
    return JSONResponse({"data": None, "errors": errors, "error_code": code.value, "message": message}, status)


def mutation_refusal(message: str, asked: GraphQLRequest) -> Response:
    """Respond with the error object of the mutation, which the UI shows.

    It writes GraphQL's `errors` only to the browser's console.
    """
    mutations = asked.mutations
    if not all(mutation.has_selection for mutation in mutations):
        return graphql_refusal(message)
    code = ErrorCode.PERMISSION_DENIED
    error: dict[str, object] = {"__typename": "PythonError", "message": message, "stack": [], "errorChain": []}
    data = {mutation.key: error | {"className": code.value} for mutation in mutations}
    return JSONResponse({"data": data, "error_code": code.value, "message": message}, HTTP_STATUS[code])


def recorded_objects(asked: GraphQLRequest, answer: Any = None) -> tuple[str, ...]:
    """List the mutations of a request, and the runs and backfills involved."""
    names = dict.fromkeys(f"mutation:{mutation.name}" for mutation in asked.mutations)
    places = [*(mutation.arguments for mutation in asked.mutations), answer]
    launched = (run.get("id") for run in values_by_key(answer, ("run",)) if isinstance(run, dict))
    ids = dict.fromkeys(f"dagster run:{value}" for value in list_texts([*values_by_key(places, RECORDED_IDS), *launched]))
    cleaned = (UNSTORABLE_CHARACTERS.sub("\ufffd", text[:120]) for text in [*names, *list(ids)[:MAX_RECORDED_IDS]])
    return tuple(cleaned)


def list_texts(values: Iterable[Any]) -> Iterable[str]:
    for value in values:
        yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str))


async def record(
    ui: DagsterUI, request: Request, caller: Caller, status: int, started: float | None, objects: tuple[str, ...] = ()
) -> None:
    """Write the audit log before the response leaves; without `started`, count the call."""
    call = AuditedCall(
        user=caller.user_id,
        organization=caller.organization,
        roles=tuple(sorted(caller.roles)),
        method=request.method,
        route=f"{PREFIX}/{{path}}" if request.url.path != f"{PREFIX}/{GRAPHQL}" else request.url.path,
        objects=objects,
        status=status,
        client=request.client.host if request.client else "",
        duration_ms=0.0 if started is None else round((time.perf_counter() - started) * 1000, 3),
    )
    if started is None:
        ui.audit_log.count(call)
    else:
        await ui.audit_log.record(call)
