"""Control access to every route: authentication, permission, and ownership of named objects. Refuse by default.

Endpoints find their caller in `scope["state"]["caller"]` (`api.dependencies.CallerDep`). An endpoint declared with
`checks_ownership` stores the id of its run in `scope["state"]["run_id"]` for the audit log.

Without sign-in there is a single caller with all permissions: nothing is looked up or refused, but changes are still
recorded.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from pydantic import SecretStr
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.audit_log import AuditLog, Call, begin_call, begin_websocket
from api.auth.authentication import Authenticator, authorization_header
from api.auth.default_experiment import DefaultExperiments, replace_in_body, replace_in_query, requests_default
from api.auth.job_tokens import acted_on_references, check_job_scope, job_references
from api.auth.ownership import check_ownership, references
from api.auth.permissions import LOCAL, OWN_ONLY, Caller, Permission, required_permission
from api.auth.program_tokens import (
    ProgramTokens,
    check_same_program,
    no_program_token,
    not_a_program,
    program_caller,
)
from api.auth.route_matching import Match, Routes
from api.dagster_ui.same_origin import is_from_browser, is_same_origin
from api.errors import error_response, method_not_allowed, no_such_route
from api.middleware import request_body as bodies
from api.middleware.request_normalization import respond_to_head
from api.routes.ui import sign_in
from api.routing import PROGRAM, PUBLIC, Audit, Declaration
from resources.errors import HTTP_STATUS, ErrorCode, HanzoError
from resources.metadata.database import Database
from resources.metadata.ownership import Reference
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION

if TYPE_CHECKING:
    from api.auth.sign_in_tokens import Tokens

log = logging.getLogger(__name__)

MAX_REFUSED_BODY_BYTES = 64 << 10
"""How much of a refused call's body is read for the audit log."""
CHALLENGE = {"WWW-Authenticate": "Bearer"}


class AccessControl:
    """ASGI middleware.

    Args:
        tokens: None without sign-in.
        websockets: application of each websocket path. It authenticates again with `scope["state"]`'s `authenticate`, and
            raises HanzoError to refuse the handshake.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Routes,
        tokens: "Tokens | None",
        database: Database,
        audit_log: AuditLog,
        max_body_bytes: int,
        websockets: Mapping[str, ASGIApp] | None = None,
        engine_token: SecretStr | None = None,
    ) -> None:
        self._app = app
        self._routes = routes
        self._authenticator = Authenticator(tokens, database, engine_token) if tokens is not None else None
        self._programs = ProgramTokens(database)
        self._database = database
        self._audit_log = audit_log
        self._max_body = max_body_bytes
        self._websockets = websockets or {}
        self._default_experiments = DefaultExperiments(database)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._open_websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        match = self._routes.match(scope["method"], scope["path"])
        if match is None and scope["method"] == "HEAD" and self._routes.match("GET", scope["path"]):
            await respond_to_head(self, scope, receive, send)
            return
        declared = match.route.declaration if match else None
        if declared is None or not declared.streams_body:
            length = bodies.declared_length(scope)
            if length is None:
                receive = bodies.limit_body(receive, self._max_body)
            elif length > self._max_body:
                await too_large(bodies.too_large(self._max_body))(scope, receive, send)
                return
        state = scope.setdefault("state", {})
        if declared is not None and declared.permission is PROGRAM:
            await self._with_sign_in(self._authenticator, match, declared, scope, receive, send)
        elif self._authenticator is None:
            state["caller"] = LOCAL
            if match is None or declared is None or declared.audit is Audit.NONE:
                await self._app(scope, receive, send)
            else:
                await self._without_sign_in(match, declared, scope, receive, send)
        elif declared is not None and declared.permission is PUBLIC:
            await self._app(scope, receive, send)
        else:
            await self._with_sign_in(self._authenticator, match, declared, scope, receive, send)

    async def _open_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate the handshake of a websocket.

        The web UI's cookie is accepted from this server's own pages only.
        """
        headers, authenticator, endpoint = Headers(scope=scope), self._authenticator, self._websockets.get(scope["path"])
        call = begin_websocket(scope, scope["path"] if endpoint is not None else "")

        async def authenticate() -> Caller:
            if authenticator is None:
                return LOCAL
            return await authenticator.caller(headers, accepts_cookie=is_same_origin(headers))

        scope.setdefault("state", {})["authenticate"] = authenticate
        try:
            call.caller = await authenticate()
            if not call.caller.may(Permission.SERVER_READ):
                raise forbidden(call.caller, Permission.SERVER_READ)
            if endpoint is None:
                raise no_such_route("websocket", scope["path"])
            if is_from_browser(headers) and not is_same_origin(headers):
                raise HanzoError(ErrorCode.PERMISSION_DENIED, "This websocket is for pages of this server only")
            await endpoint(scope, receive, send)
        except HanzoError as refusal:
            await self._audit_log.record_call(call, refusal.status)
            await refuse_handshake(error_response(refusal.code, refusal.message), scope, send)
        except SQLAlchemyError as error:
            log.warning("the metadata database is unavailable: %s", type(error).__name__)
            message = "The metadata database is unavailable: try again later"
            await refuse_handshake(error_response(ErrorCode.TEMPORARILY_UNAVAILABLE, message), scope, send)

    async def _without_sign_in(
        self, match: Match, declared: Declaration, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass a call on without sign-in, and record it with the objects that it names."""
        call = scope["state"]["call"] = begin_call(scope, match)
        call.caller, call.audit = LOCAL, declared.audit
        if not declared.checks_ownership:
            body: Any = None
            if not declared.streams_body and bodies.declared_length(scope) != 0:
                try:
                    raw = await bodies.read_body(receive)
                except HTTPException as refusal:
                    await too_large(refusal)(scope, receive, send)
                    return
                except HanzoError:
                    return  # the client disconnected: no response is needed, and nothing was done
                receive = bodies.resend_body(raw, receive)
                with suppress(HanzoError):  # the endpoint reports what is wrong with it
                    body = bodies.parse_body(raw, scope["path"])
            call.references = references(match.route.shape, match.parameters, parse_query(scope), body)
        await self._answer_on_record(call, scope, receive, send)

    async def _with_sign_in(
        self,
        authenticator: Authenticator | None,
        match: Match | None,
        declared: Declaration | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        call, headers = begin_call(scope, match), Headers(scope=scope)
        scope["state"]["call"] = call
        try:
            if match is not None and declared is not None and declared.permission is PROGRAM:
                await self._authorize_program(call, authenticator, match, headers, scope)
                call.audit = declared.audit
            else:
                assert authenticator is not None
                accepts_cookie = declared is not None and not declared.writes
                call.caller = await authenticator.caller(headers, accepts_cookie=accepts_cookie)
                if match is None:
                    raise no_such_route(scope["method"], scope["path"])
                if declared is None or not isinstance(declared.permission, Permission):
                    log.error("%s declares no permission and is always refused", match.route.shape)
                    raise HanzoError(ErrorCode.PERMISSION_DENIED, "This server does not allow this call")
                call.audit = declared.audit
                receive = await self._authorize(call, match, declared, scope, receive)
        except HanzoError as refusal:
            await self._refuse(call, refusal, headers, scope, receive, send)
            return
        except HTTPException as refusal:
            await too_large(refusal)(scope, receive, send)
            return
        except SQLAlchemyError as error:
            log.warning("the metadata database is unavailable: %s", type(error).__name__)
            await self._record_failed(call, HTTP_STATUS[ErrorCode.TEMPORARILY_UNAVAILABLE])
            message = "The metadata database is unavailable: try again later"
            await error_response(ErrorCode.TEMPORARILY_UNAVAILABLE, message)(scope, receive, send)
            return
        except Exception:
            await self._record_failed(call, HTTP_STATUS[ErrorCode.INTERNAL_ERROR])
            raise
        scope["state"]["caller"] = call.caller
        if declared.audit is Audit.NONE:
            await self._app(scope, receive, send)
        else:
            await self._answer_on_record(call, scope, receive, send)

    async def _authorize_program(
        self, call: Call, authenticator: Authenticator | None, match: Match, headers: Headers, scope: Scope
    ) -> None:
        """Admit the pods of the program in the path.

        Raises:
            HanzoError: 401 without a token, 403 for every other caller.
        """
        grant = await self._programs.find(authorization_header(headers))
        if grant is None:
            if authenticator is None:
                raise no_program_token()
            call.caller = await authenticator.caller(headers, accepts_cookie=False)
            raise not_a_program()
        call.caller = program_caller(grant)
        call.references = references(match.route.shape, match.parameters, {})
        check_same_program(grant, match.parameters)
        scope["state"]["program_grant"] = grant

    async def _authorize(self, call: Call, match: Match, declared: Declaration, scope: Scope, receive: Receive) -> Receive:
        """Authorize the caller, or raise. Return the endpoint's `receive`."""
        caller = call.caller
        assert caller is not None
        permission = declared.permission
        assert isinstance(permission, Permission)
        own = OWN_ONLY.get(permission)
        if not caller.may(permission) and not (own and caller.may(own)):
            call.references = await refused_references(match, declared, scope, receive)
            raise forbidden(caller, permission)
        if caller.job is not None and not declared.allows_jobs:
            call.references = await refused_references(match, declared, scope, receive)
            raise HanzoError(ErrorCode.PERMISSION_DENIED, "A job's token is valid for its own run only, not for this call")
        if declared.checks_ownership and caller.job is None:
            return receive
        body: Any = None
        if not declared.streams_body and bodies.declared_length(scope) != 0:
            raw = await bodies.read_body(receive)
            body = bodies.parse_body(raw, scope["path"])
            receive = bodies.resend_body(raw, receive)
            needed = required_permission(permission, body)
            if needed is not permission and not caller.may(needed):
                call.references = references(match.route.shape, match.parameters, parse_query(scope), body)
                raise forbidden(caller, needed)
        query = parse_query(scope)
        if caller.organization != DEFAULT_ORGANIZATION and requests_default(call.route, query, body):
            number = await self._default_experiments.number(caller.organization)
            query_text = replace_in_query(query, number)
            scope["query_string"] = query_text.encode()
            query = parse_qs(query_text, keep_blank_values=True)
            if isinstance(body, dict):
                body = replace_in_body(call.route, body, number)
                raw = json.dumps(body).encode()
                scope["headers"] = bodies.with_content_length(scope["headers"], len(raw))
                receive = bodies.resend_body(raw, receive)
        call.references = references(match.route.shape, match.parameters, query, body)
        if caller.job is not None:
            acted_on = acted_on_references(match.route.shape, match.parameters, query, call.references)
            call.references = job_references(match.route.template, acted_on, body)
            lists = permission is not Permission.SERVER_READ
            await run_in_threadpool(
                check_job_scope, self._database, caller.job, call.references, writes=declared.writes, lists=lists
            )
        elif call.references:
            only_own = not caller.may(permission)
            await run_in_threadpool(
                check_ownership,
                self._database,
                caller,
                call.references,
                may_be_new=declared.creates_model,
                only_own=only_own,
            )
        return receive

    async def _refuse(
        self, call: Call, refusal: HanzoError, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        answer: Response = error_response(refusal.code, refusal.message)
        if refusal.code is ErrorCode.ENDPOINT_NOT_FOUND and (methods := self._routes.allowed_methods(scope["path"])):
            answer = method_not_allowed(refusal.message, methods)
        if refusal.code is ErrorCode.UNAUTHENTICATED:
            if sign_in.wants_page(scope["method"], headers):
                answer = sign_in.page(answer.status_code)
            answer.headers.update(CHALLENGE)
        await self._audit_log.record_call(call, answer.status_code)
        await answer(scope, receive, send)

    async def _answer_on_record(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the call, and record it before its response is sent.

        A call that fails without a response is recorded too.
        """
        answered = False

        async def recorded(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                await self._audit_log.record_call(call, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, recorded)
        except Exception:
            if not answered:
                await self._audit_log.record_call(call, HTTP_STATUS[ErrorCode.INTERNAL_ERROR])
            raise

    async def _record_failed(self, call: Call, status: int) -> None:
        """Record a call that failed during authorization, if its route is audited."""
        if call.audit is not Audit.NONE:
            await self._audit_log.record_call(call, status)


def parse_query(scope: Scope) -> dict[str, list[str]]:
    return parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)


async def refused_references(match: Match, declared: Declaration, scope: Scope, receive: Receive) -> frozenset[Reference]:
    """Return what a refused call names, for the audit log, without look-ups."""
    body: Any = None
    if (
        not declared.streams_body
        and not declared.checks_ownership
        and 0 < (bodies.declared_length(scope) or 0) <= MAX_REFUSED_BODY_BYTES
    ):
        with suppress(HanzoError, HTTPException):  # not JSON, or the client disconnected
            body = bodies.parse_body(await bodies.read_body(receive), scope["path"])
    return references(match.route.shape, match.parameters, parse_query(scope), body)


async def refuse_handshake(answer: Response, scope: Scope, send: Send) -> None:
    """Refuse a websocket handshake with an HTTP response, or the server's 403 if unsupported."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    start = {"type": "websocket.http.response.start", "status": answer.status_code, "headers": answer.raw_headers}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": bytes(answer.body)})


def too_large(refusal: HTTPException) -> Response:
    return error_response(ErrorCode.INVALID_PARAMETER_VALUE, refusal.detail, refusal.status_code)


def forbidden(caller: Caller, permission: Permission) -> HanzoError:
    roles = ", ".join(sorted(caller.roles))
    return HanzoError(ErrorCode.PERMISSION_DENIED, f"Your role ({roles}) does not include {permission}")
