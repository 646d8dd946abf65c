"""A page in a browser reads and never writes (row F5), whoever's script runs in it.

Browsers name the page's origin in every request that may change something, and cannot be told by a page to leave that out;
MLflow's clients send no such header. So the wall needs no knowledge of the UI, and holds for forged requests of other sites.
"""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import error_response
from api.middleware.request_headers import header
from resources.errors import ErrorCode

READ_PATHS = re.compile(
    r"/(ajax-)?api/\d\.\d/?mlflow/([a-z-]+/)+(search|search-datasets|get-latest-versions)"
    r"|/graphql"
    r"|/ajax-api/\d\.\d/mlflow/(ui-telemetry|gateway-proxy)"
)
"""Paths of what only asks, though by POST. All of a path: what ended so was taken for a question, as an artifact of the name
`search` that was deleted.
"""
SIGN_IN_PATHS = ("/login", "/logout")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class ReadOnlyPages:
    """ASGI middleware: refuses what a web page sends to MLflow's API, unless it only reads."""

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
    return method not in SAFE_METHODS and not asks


def is_from_page(scope: Scope) -> bool:
    return header(scope, b"origin") is not None or header(scope, b"sec-fetch-site") is not None
