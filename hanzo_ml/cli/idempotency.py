"""Start work exactly once, retrying with an idempotency key."""

import uuid
from typing import Annotated, Any

import httpx
import typer
from tenacity import RetryError, Retrying, retry_if_exception, stop_after_attempt

from hanzo_ml.cli.connection import Refused, call, tracking_uri
from hanzo_ml.client.points import retry_delay

MAX_ATTEMPTS = 8
"""With the pauses between them, a server that is started anew is waited for."""
CONNECT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout)

KeyOption = Annotated[
    str | None, typer.Option("--key", help="Any text of your own: said again with the same one, it is started once.")
]


def start_once(path: str, key: str | None, **options: Any) -> Any:
    """The answer to a POST that starts work, by the user's own key or a new one.

    Raises:
        Refused: as `call` does; or no answer came, and what was asked for may have been started: the message has its key.
    """
    if key is not None and not (key.strip() and key.isascii() and key.isprintable()):
        raise Refused(f"--key {key!r} is none: give letters and digits")
    sent, lost = key or uuid.uuid4().hex, ""

    def may_have_started(error: BaseException) -> bool:
        nonlocal lost
        if not isinstance(error, httpx.TransportError) or (isinstance(error, CONNECT_ERRORS) and not lost):
            return False
        lost = type(error).__name__
        return True

    try:
        retrying = Retrying(
            retry=retry_if_exception(may_have_started),
            wait=lambda state: retry_delay(state.attempt_number),
            stop=stop_after_attempt(MAX_ATTEMPTS),
        )
        return retrying(call, "POST", path, headers={"Idempotency-Key": sent}, **options)
    except RetryError:
        raise Refused(
            f"{tracking_uri()} broke off ({lost}), and may have started it all the same: with `--key {sent}` it is started "
            "once, however often you say it"
        ) from None
