"""Declare routes: path, permission, audit and types of each in one place.

A decorator of `Router` carries the path, who may call it and how calls are audited; the endpoint's signature carries the
types of request and response. Access control, audit log, OpenAPI document and fast path are derived from it.
A route without a declaration is refused by the access control, and ends the start of the server (`undeclared`).
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, TypeAlias, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts

from api.auth.permissions import Permission
from api.fast_path.middleware import FastPath
from api.json_bodies import StrictRoute
from resources.errors import invalid
from resources.metadata.field_rules import printable

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class Public(Enum):
    """In place of a permission: the route needs no sign-in."""

    PUBLIC = "public"


PUBLIC = Public.PUBLIC


class ProgramOnly(Enum):
    """In place of a permission: only pods of a program may call the route."""

    PROGRAM = "program"


PROGRAM = ProgramOnly.PROGRAM
Access: TypeAlias = Permission | Public | ProgramOnly


class Audit(StrEnum):
    """How calls of a route get into the audit log (`api.auth.audit_log`)."""

    NONE = "none"
    EACH = "each"
    """A row for each call."""
    COUNTED = "counted"
    """A row a minute with the number of calls, counted in the transaction of their changes: for training logs."""
    NOTED = "noted"
    """Counted in memory first: for frequent reads, whose responses do not wait for the log."""


@dataclass(frozen=True)
class AlsoAnswers:
    """A second status with its own JSON body."""

    status: int
    description: str
    type: Any


@dataclass(frozen=True)
class Declaration:
    """What a route declares apart from its path and types; see the parameters of `Router.route`."""

    permission: Access
    audit: Audit
    writes: bool
    checks_ownership: bool = False
    creates_model: bool = False
    streams_body: bool = False
    allows_jobs: bool = False
    produces: str | None = None
    ranges: bool = False
    response: str | None = None
    also: AlsoAnswers | None = None
    fast_path: FastPath | None = None


class Router:
    """Routes below one prefix.

    Args:
        alias_prefix: second prefix for the routes with `alias=True`, hidden from the OpenAPI document.
        strict: parse JSON bodies strictly by RFC 8259, and read the parameters of a GET request from its body as well
            (`api.json_bodies`).
    """

    def __init__(
        self,
        prefix: str = "",
        *,
        tag: str = "",
        alias_prefix: str | None = None,
        strict: bool = True,
        route_class: type[APIRoute] | None = None,
        include_in_schema: bool = True,
    ) -> None:
        kind = route_class or (StrictRoute if strict else APIRoute)
        shared: dict[str, Any] = {"tags": [tag] if tag else None, "route_class": kind}
        self._main = APIRouter(prefix=prefix, include_in_schema=include_in_schema, **shared)
        self._aliases = APIRouter(prefix=alias_prefix or "", include_in_schema=False, **shared)
        self._has_aliases = alias_prefix is not None
        self._is_v1 = prefix.startswith("/v1")

    @property
    def routes(self) -> list[Any]:
        return [*self._main.routes, *self._aliases.routes]

    def include_in(self, app: FastAPI, prefix: str = "") -> None:
        app.include_router(self._main, prefix=prefix)
        if self._has_aliases:
            app.include_router(self._aliases, prefix=prefix)

    def get(self, path: str, permission: Access, **options: Any) -> Callable[[Endpoint], Endpoint]:
        return self.route("GET", path, permission, **options)

    def post(self, path: str, permission: Access, **options: Any) -> Callable[[Endpoint], Endpoint]:
        return self.route("POST", path, permission, **options)

    def put(self, path: str, permission: Access, **options: Any) -> Callable[[Endpoint], Endpoint]:
        return self.route("PUT", path, permission, **options)

    def patch(self, path: str, permission: Access, **options: Any) -> Callable[[Endpoint], Endpoint]:
        return self.route("PATCH", path, permission, **options)

    def delete(self, path: str, permission: Access, **options: Any) -> Callable[[Endpoint], Endpoint]:
        return self.route("DELETE", path, permission, **options)

    def route(
        self,
        method: str,
        path: str,
        permission: Access,
        *,
        audit: Audit | None = None,
        read_only: bool = False,
        checks_ownership: bool = False,
        creates_model: bool = False,
        streams_body: bool = False,
        allows_jobs: bool = False,
        status_code: int | None = None,
        produces: str | None = None,
        ranges: bool = False,
        response: str | None = None,
        also: AlsoAnswers | None = None,
        fast_path: FastPath | None = None,
        head: bool = False,
        alias: bool = False,
        dependencies: Sequence[Any] = (),
    ) -> Callable[[Endpoint], Endpoint]:
        """Declare a route of the decorated endpoint.

        Args:
            audit: defaults to `EACH` for routes that write.
            read_only: changes nothing, despite its method.
            checks_ownership: the endpoint itself compares the organization of what it finds with the caller's, and
                access control does not read the body. It stores the run's id in `scope["state"]["run_id"]` for the
                audit log.
            creates_model: a registered model that the request names may be new.
            streams_body: the body is a file of any size that names no object, or is not read at all.
            allows_jobs: accepts a job's own token, for the objects of the job. Never for routes that list or search.
            produces: media type of a response other than JSON.
            ranges: supports range requests.
            response: `module:Type` of the response, where importing it is slow (numpy); by default from the signature.
            also: a second status with a JSON body.
            fast_path: how to answer simple calls without FastAPI (`api.fast_path`).
            head: the endpoint answers HEAD itself. Other routes answer HEAD as GET without the body.
            alias: serve it below the router's `alias_prefix` as well.
        """
        writes = method != "GET" and not read_only
        declaration = Declaration(
            permission=permission,
            audit=audit or (Audit.EACH if writes else Audit.NONE),
            writes=writes,
            checks_ownership=checks_ownership,
            creates_model=creates_model,
            streams_body=streams_body,
            allows_jobs=allows_jobs,
            produces=produces,
            ranges=ranges,
            response=response,
            also=also,
            fast_path=fast_path,
        )
        options: dict[str, Any] = {"status_code": status_code, "dependencies": dependencies, "response_model": None}
        options["refuses_unknown"] = self._is_v1  # MLflow's routes ignore unknown parameters, as MLflow does

        def register(endpoint: Endpoint) -> Endpoint:
            if head:
                add_route(self._main, path, endpoint, declaration, methods=["HEAD"], include_in_schema=False, **options)
            add_route(self._main, path, endpoint, declaration, methods=[method], **options)
            if alias:
                add_route(self._aliases, path, endpoint, declaration, methods=[method], **options)
            return endpoint

        return register


def add_route(
    router: APIRouter, path: str, endpoint: Endpoint, declaration: Declaration, refuses_unknown: bool, **options: Any
) -> None:
    known: set[str] = set()
    if refuses_unknown:
        options["dependencies"] = [*options["dependencies"], Depends(refuse_unknown_parameters(known))]
    router.add_api_route(path, endpoint, **options)
    route = router.routes[-1]
    assert isinstance(route, APIRoute)
    known.update(list_query_parameters(route.dependant))
    vars(route)["declaration"] = declaration


def list_query_parameters(dependant: Dependant) -> Iterator[str]:
    """Yield the names of the query parameters of an endpoint and its dependencies."""
    yield from (field.alias for field in dependant.query_params)
    for dependency in dependant.dependencies:
        yield from list_query_parameters(dependency)


def refuse_unknown_parameters(known: Collection[str]) -> Callable[[Request], Awaitable[None]]:
    """Make a dependency that rejects query parameters other than `known`.

    Before, `POST /v1/jobs?dryrun=true` queued the job.
    """

    async def refuse(request: Request) -> None:
        for name in request.query_params:
            if name not in known:
                taken = f"use {', '.join(sorted(known))}" if known else "this route takes none"
                raise invalid(f"unknown query parameter '{printable(name)}': {taken}")

    return refuse


def find_declaration(app: FastAPI, context: RouteContext) -> Declaration | None:
    """Return the declaration of a route; None without one."""
    if context.path in (app.openapi_url, app.docs_url, app.redoc_url, app.swagger_ui_oauth2_redirect_url):
        return Declaration(Permission.SERVER_READ, Audit.NONE, writes=False)  # FastAPI's own pages
    declared: Declaration | None = vars(context.original_route).get("declaration")
    return declared


def undeclared(app: FastAPI) -> list[str]:
    """List the routes without a declared permission, which access control refuses."""
    return [str(context.path) for context in iter_route_contexts(app.routes) if find_declaration(app, context) is None]
