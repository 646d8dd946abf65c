"""Validate Host and Origin, set security headers, refuse writes from web pages."""

import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import error_response
from api.middleware.request_body import header
from resources.errors import ErrorCode

# Validate Host and Origin headers, and set security headers on every response.
#
# The Host must be one of this server's names, which stops DNS rebinding (CVE-2025-14279); pages of other origins are
# refused, and no response has an Access-Control header. Probes accept any Host: Kubernetes calls them by the pod's
# address, and they reveal nothing.

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
PROBES = frozenset({"/alive", "/ready", "/health"})
SECURITY_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"x-frame-options", b"SAMEORIGIN"))
"""On every response, as in MLflow, in addition to the policy of a page (`routes.ui.static_files`)."""
SECURITY_HEADER_NAMES = frozenset(name for name, _ in SECURITY_HEADERS)
REFUSALS = {"Host": "Invalid Host header", "Origin": "Cross-origin request blocked"}
"""Start of the messages as in MLflow's, on which its clients and test suites rely."""


class HostValidation:
    """ASGI middleware: check Host and Origin against `allowed`, and add security headers."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        marked = with_security_headers(send)
        host, origin = header(scope, b"host") or b"", header(scope, b"origin")
        if scope["path"] not in PROBES and host_name(f"//{host.decode('latin-1')}") not in self._allowed:
            await self._refuse("Host", scope, receive, marked)
        elif origin is not None and host_name(origin.decode("latin-1")) not in self._allowed:
            await self._refuse("Origin", scope, receive, marked)
        else:
            await self._app(scope, receive, marked)

    async def _refuse(self, header: str, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        names = ", ".join(sorted(self._allowed))
        message = f"{REFUSALS[header]}: it does not name this server. Use {names}, or set server.allowed_hosts"
        await error_response(ErrorCode.PERMISSION_DENIED, message)(scope, receive, send)


def with_security_headers(send: Send) -> Send:
    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *(pair for pair in message.get("headers", ()) if pair[0] not in SECURITY_HEADER_NAMES),
                *SECURITY_HEADERS,
            ]
        await send(message)

    return marked


@lru_cache(maxsize=256)  # few distinct names, parsed for every request
def host_name(url: str) -> str | None:
    """Return the host of a URL or of `//HOST:PORT`, without its port."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


# Web pages may only read, whichever script runs in them.
#
# Browsers send the page's origin with every request that may change something, and a page cannot suppress it; MLflow's
# clients send no such header. So the check is independent of the UI, and stops forged requests of other sites as well.

READ_PATHS = re.compile(
    r"/(ajax-)?api/\d\.\d/?mlflow/([a-z-]+/)+(search|search-datasets|get-latest-versions)"
    r"|/graphql"
    r"|/ajax-api/\d\.\d/mlflow/(ui-telemetry|gateway-proxy)"
)
"""POST paths that only read. They must match entirely: matched by their end, the deletion of an artifact named `search` once
counted as a read.
"""
SIGN_IN_PATHS = ("/login", "/logout")
OTHER_PAGES = ("/dagster/",)
"""Pages below these paths may write; their routes check origin and role themselves."""
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class ReadOnlyPages:
    """ASGI middleware: refuse writes to MLflow's API from web pages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and changes_something(scope["method"], scope["path"]) and is_from_page(scope):
            message = "The web UI is read-only: use MLflow's client, the REST API or `hanzo-ml` to change something"
            await error_response(ErrorCode.PERMISSION_DENIED, message)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def changes_something(method: str, path: str) -> bool:
    asks = method == "POST" and (READ_PATHS.fullmatch(path) is not None or path in SIGN_IN_PATHS)
    return method not in SAFE_METHODS and not asks and not path.startswith(OTHER_PAGES)


def is_from_page(scope: Scope) -> bool:
    return header(scope, b"origin") is not None or header(scope, b"sec-fetch-site") is not None
