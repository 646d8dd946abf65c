"""Normalize requests: leading slashes of a path, and HEAD as a GET without its body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadersSent(OSError):
    """Ends a response after its headers, like a closed connection: a followed log never ends."""


async def respond_to_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer HEAD with the headers of GET, on a route without its own HEAD."""
    answered = False

    async def begin(message: Message) -> None:
        nonlocal answered
        if answered:
            raise HeadersSent
        await send(message)
        if message["type"] == "http.response.start":
            answered = True
            await send({"type": "http.response.body", "body": b""})

    try:
        await app({**scope, "method": "GET"}, receive, begin)
    except Exception:
        # After the response has begun, this is `HeadersSent`, or an exception that the application made of it.
        if not answered:
            raise


class LeadingSlashes:
    """ASGI middleware: rewrite `//api/2.0/...` to `/api/2.0/...`, before any decision by path.

    A script whose tracking URI ends with a slash sends such paths, which MLflow's server accepts. Other slashes are kept.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("//"):
            raw = b"/" + scope["raw_path"].lstrip(b"/") if scope.get("raw_path") else None
            scope = {**scope, "path": "/" + scope["path"].lstrip("/"), "raw_path": raw}
        await self._app(scope, receive, send)
