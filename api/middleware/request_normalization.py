"""`//api/2.0/...` as `/api/2.0/...`: a script asks so whose tracking URI ends with a slash, and MLflow's server answers."""

from starlette.types import ASGIApp, Receive, Scope, Send


class LeadingSlashes:
    """ASGI middleware, in front of whatever decides by the path. Slashes further in mean what they say: they are names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("//"):
            raw = b"/" + scope["raw_path"].lstrip(b"/") if scope.get("raw_path") else None
            scope = {**scope, "path": "/" + scope["path"].lstrip("/"), "raw_path": raw}
        await self._app(scope, receive, send)
