"""HEAD: what GET would answer, without its body, on every route that has GET and no answer of its own to HEAD."""

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
