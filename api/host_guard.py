"""Loopback without sign-in serves loopback names only, so that no web page can reach it through DNS rebinding."""

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import error_response
from resources.errors import ErrorCode

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class HostGuard:
    """ASGI middleware: refuses a request whose Host or Origin is none of `allowed`."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if host_name(f"//{headers.get('host', '')}") not in self._allowed:
                await self._refuse("Host", scope, receive, send)
                return
            if origin is not None and host_name(origin) not in self._allowed:
                await self._refuse("Origin", scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refuse(self, header: str, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"The {header} header does not name this machine: use {', '.join(sorted(self._allowed))}"
        await error_response(ErrorCode.PERMISSION_DENIED, message)(scope, receive, send)


def host_name(url: str) -> str | None:
    """The host of a URL or of `//HOST:PORT`, without its port."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
