"""Answer every error as MLflow's `{"error_code", "message"}`.

A message is one line that says what to do, without a stack trace, SQL or a path of the server.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import DataError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recipes.contracts.validation_errors import explain_unknown_key, list_known_keys
from recipes.storage.artifact_store import BrokenArtifact
from recipes.storage.buckets import StoreFull, StoreRefuses, StoreUnavailable
from resources.errors import HTTP_STATUS, ErrorCode, HanzoError

log = logging.getLogger(__name__)

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
SEE_DOCS = "See the API docs for more information about request parameters."
RECIPE_BODY, COMMAND_BODY = "job with a recipe", "job with a command"
"""Names of the two bodies of `POST /v1/jobs` in pydantic's error locations."""
CODES_BY_STATUS = {
    403: ErrorCode.PERMISSION_DENIED,
    404: ErrorCode.ENDPOINT_NOT_FOUND,
    405: ErrorCode.ENDPOINT_NOT_FOUND,
}


class ErrorBody(BaseModel):
    """The response body of every error."""

    error_code: str
    message: str


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "the request is refused; the message says what to do"},
    "5XX": {"model": ErrorBody, "description": "the server failed, or is temporarily unavailable"},
}
"""Error responses of every route, for the OpenAPI document."""


def install_error_handlers(app: FastAPI) -> None:
    """Register the handlers of all errors."""
    for kind, answer in HANDLERS.items():
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Exception, internal_error)


def response_to_error(error: Exception, request: Request) -> JSONResponse:
    """Return the response to an error, for middleware; raise an unexpected error again."""
    for kind in type(error).__mro__:
        if kind in HANDLERS:
            return HANDLERS[kind](request, error)
    raise error


def public_message(request: Request, error: Exception) -> str:
    """Return the message for an error, for routes with their own response format.

    Details of an unexpected error go to the server's log only.
    """
    answer = next((HANDLERS[kind] for kind in type(error).__mro__ if kind in HANDLERS), internal_error)(request, error)
    return str(json.loads(bytes(answer.body))["message"])


def error_response(code: ErrorCode, message: str, status: int | None = None) -> JSONResponse:
    # A message quotes parts of the request, and must stay one line in any log.
    line = CONTROL_CHARACTERS.sub(lambda found: repr(found[0])[1:-1], message)
    return JSONResponse({"error_code": code.value, "message": line}, status or HTTP_STATUS[code])


def method_not_allowed(message: str, methods: Iterable[str]) -> JSONResponse:
    """Return a 405 that lists the methods which the path accepts."""
    answer = error_response(ErrorCode.ENDPOINT_NOT_FOUND, message, 405)
    answer.headers["Allow"] = ", ".join(methods)
    return answer


def no_such_route(method: str, path: str) -> HanzoError:
    return HanzoError(ErrorCode.ENDPOINT_NOT_FOUND, f"There is no {method} {path[:250]} on this server")


def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HanzoError)
    return error_response(error.code, error.message)


def _not_valid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    body = getattr(request.scope.get("route"), "body_field", None)
    message = first_problem(error.errors(), body and body.field_info.annotation, error.body)
    return error_response(ErrorCode.INVALID_PARAMETER_VALUE, message)


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = CODES_BY_STATUS.get(error.status_code)
    if code is ErrorCode.ENDPOINT_NOT_FOUND:
        message = no_such_route(request.method, request.url.path).message
        if error.status_code == 405:  # Starlette would list only the methods of the first route at the path
            return method_not_allowed(message, request.app.state.routes.allowed_methods(request.scope["path"]))
    else:
        message = str(error.detail)
    return error_response(code or ErrorCode.INVALID_PARAMETER_VALUE, message, error.status_code)


def _no_artifact(_: Request, error: Exception) -> JSONResponse:
    log.info("refused an artifact path: %s", error)
    return error_response(ErrorCode.INVALID_PARAMETER_VALUE, "The artifact path is not in this server's store")


def _store_full(_: Request, error: Exception) -> JSONResponse:
    log.error("the object store is full: %s", error)
    return error_response(ErrorCode.RESOURCE_EXHAUSTED, "The object store is full, and nothing was stored: free some space")


def _store_unavailable(_: Request, error: Exception) -> JSONResponse:
    log.error("the object store is unavailable: %s", error)
    return error_response(
        ErrorCode.TEMPORARILY_UNAVAILABLE,
        "The object store is unavailable (see the server's log): try again later",
    )


def _store_refuses(_: Request, error: Exception) -> JSONResponse:
    log.error("the object store refuses the server: %s", error)
    return error_response(
        ErrorCode.STORAGE_DENIED,
        "The object store refuses this server: an operator has to correct storage.access_key and storage.secret_key, or "
        "storage.endpoint and storage.buckets; the server's log says which",
    )


def _no_data(_: Request, error: Exception) -> JSONResponse:
    log.info("the database refused a value: %s", error)
    return error_response(ErrorCode.INVALID_PARAMETER_VALUE, "A value of the request cannot be stored")


def _unavailable(_: Request, error: Exception) -> JSONResponse:
    log.warning("the metadata database is unavailable: %s", error)
    return error_response(ErrorCode.TEMPORARILY_UNAVAILABLE, "The metadata database is unavailable: try again later")


def internal_error(request: Request, error: Exception) -> JSONResponse:
    log.error("unexpected error in %s %s", request.method, request.url.path, exc_info=error)
    return error_response(ErrorCode.INTERNAL_ERROR, "Unexpected error in the server: see its log")


HANDLERS: dict[type, Callable[[Request, Exception], JSONResponse]] = {
    HanzoError: _refused,
    RequestValidationError: _not_valid,
    HTTPException: _http,
    BrokenArtifact: _no_artifact,
    StoreFull: _store_full,
    StoreUnavailable: _store_unavailable,
    StoreRefuses: _store_refuses,
    DataError: _no_data,
    OperationalError: _unavailable,
    InterfaceError: _unavailable,
    NoConnection: _unavailable,
}


def first_problem(problems: Sequence[Any], kind: Any = None, body: Any = None) -> str:
    """Return the message for a request's first problem, in MLflow's words where possible."""
    problem = problems[0]
    location = problem["loc"][1:]
    if isinstance(body, dict | list) and problem["loc"][0] == "body":
        lacks = location[-1:] if problem["type"] == "missing" else ()
        location = (*body_location(body, location[: len(location) - len(lacks)]), *lacks)
    where = parameter_path(location)
    if problem["type"] == "extra_forbidden":
        return explain_unknown_key(where, list_known_keys(kind, problem["loc"][1:-1]))
    if problem["type"] == "value_error":
        what = problem["msg"].removeprefix("Value error, ")
        return f"'{where}': {what}" if where else what
    if problem["type"] == "json_invalid":
        return f"Malformed JSON in the request body: {problem['ctx']['error']}"
    if not where and problem["type"] in ("list_type", "too_long"):
        return f"Bad Request. The request body must be a JSON list of rows: {problem['msg']}"
    if not where:
        return "Bad Request. Content-Type must be application/json, and the request body a JSON object"
    if problem["type"] in ("missing", "string_too_short"):
        return f"Missing value for required parameter '{where}'. {SEE_DOCS}"
    invalid = f"Invalid value {abbreviated(problem.get('input'))} for parameter '{where}' supplied"
    if problem["type"] == "greater_than_equal" and problem["ctx"]["ge"] == 1:
        return f"{invalid}. It must be a positive integer. {SEE_DOCS}"
    if problem["type"] == "less_than_equal":
        return f"{invalid}. It must be at most {problem['ctx']['le']}. {SEE_DOCS}"
    wanted = problem["msg"].replace("tuple", "list")
    return f"{invalid}: {wanted}. Hint: Value was of type '{type(problem.get('input')).__name__}'. {SEE_DOCS}"


def body_location(body: Any, location: Sequence[Any]) -> Iterator[str | int]:
    """Yield the keys and indexes of a pydantic `loc`, without names of union members."""
    for part in location:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            body = body[part]
            yield part


def parameter_path(location: Sequence[str | int]) -> str:
    """Format `("metrics", 0, "value")` as `metrics[0].value`, without pydantic's names of union members."""
    path = ""
    for part in location:
        if part in ("float", "constrained-str", RECIPE_BODY, COMMAND_BODY):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def abbreviated(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))[:100]
    except (TypeError, ValueError):
        return "of that type"


class UnhandledErrors:
    """ASGI middleware: turn an exception into a 500.

    Once a response has begun, the exception is raised again, so that the server closes the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if begun:
                raise
            await internal_error(Request(scope), error)(scope, receive, send)
