"""Normalize requests: leading slashes of a path, and HEAD as a GET without its body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadersSent(OSError):
    """Ends an answer whose body nobody wants, as a connection that the client has cut would: a log never ends by itself."""


async def respond_to_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer HEAD on a route that has GET and no answer of its own to HEAD: as GET, without the body."""
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
        # Once it has answered, what comes is `HeadersSent`, as whatever it became on its way through the application.
        if not answered:
            raise


class LeadingSlashes:
    """ASGI middleware: `//api/2.0/...` becomes `/api/2.0/...`, before anything decides by the path.

    A script whose tracking URI ends with a slash asks so, and MLflow's server answers. Slashes further in are names.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("//"):
            raw = b"/" + scope["raw_path"].lstrip(b"/") if scope.get("raw_path") else None
            scope = {**scope, "path": "/" + scope["path"].lstrip("/"), "raw_path": raw}
        await self._app(scope, receive, send)
