"""`//api/2.0/...` as `/api/2.0/...`: a script asks so whose tracking URI ends with a slash, and MLflow's server answers."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Enough(OSError):
    """Ends an answer whose body nobody wants, as a connection that the client has cut would: a log never ends by itself."""


async def head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Ask the application as if it were a GET."""
    answered = False

    async def begin(message: Message) -> None:
        nonlocal answered
        if answered:
            raise Enough
        await send(message)
        if message["type"] == "http.response.start":
            answered = True
            await send({"type": "http.response.body", "body": b""})

    try:
        await app({**scope, "method": "GET"}, receive, begin)
    except Exception:
        # Once it has answered, what comes is `Enough`, as whatever it became on its way through the application.
        if not answered:
            raise


class LeadingSlashes:
    """ASGI middleware, in front of whatever decides by the path. Slashes further in mean what they say: they are names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("//"):
            raw = b"/" + scope["raw_path"].lstrip(b"/") if scope.get("raw_path") else None
            scope = {**scope, "path": "/" + scope["path"].lstrip("/"), "raw_path": raw}
        await self._app(scope, receive, send)
