"""What nobody expects is answered here, inside of what marks and measures every answer: Starlette's own last resort stands
outside of all middleware, so its 500 had no security headers and was not in the metrics.
"""

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import unexpected


class AnswersUnexpected:
    """ASGI middleware: an exception becomes a 500, unless an answer has begun, which only a cut connection can end."""

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
            await unexpected(Request(scope), error)(scope, receive, send)
