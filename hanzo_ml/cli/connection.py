"""Call the API with one-line errors, retrying starts with an idempotency key."""

import functools
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import httpx
import typer
from tenacity import RetryError, Retrying, retry_if_exception, stop_after_attempt

from hanzo_ml.client.retry import retry_delay
from hanzo_ml.client.transport import authorization_header

DEFAULT_URI = "http://127.0.0.1:8057"
TIMEOUT_SECONDS = 600.0
KEEP_ALIVE_SECONDS = 3.0
"""Less than the server's 5 s, so that no request is sent on a connection that the server closes at that moment."""


class Refused(Exception):
    """The server or the command line refuses the command; the message says what to do."""


def tracking_uri() -> str:
    """`HANZO_ML_TRACKING_URI`, else the embedded stack's address. Raises Refused if it is not a valid URL."""
    port = os.environ.get("HANZO_ML_SERVER_PORT")
    default = f"http://127.0.0.1:{port}" if port else DEFAULT_URI
    uri = os.environ.get("HANZO_ML_TRACKING_URI", default).rstrip("/")
    try:
        parsed = httpx.URL(uri)
        is_address = parsed.scheme in ("http", "https") and parsed.host.encode("idna") != b""
    except (httpx.InvalidURL, UnicodeError):
        is_address = False
    if not is_address:
        name = "HANZO_ML_TRACKING_URI" if "HANZO_ML_TRACKING_URI" in os.environ else "HANZO_ML_SERVER_PORT"
        raise Refused(f"{name} is {uri!r}, which is not the address of a server: set it to one such as {DEFAULT_URI}")
    return uri


def build_url(path: str) -> str:
    """The whole URL.

    Raises:
        Refused: an id in it is empty, so that another route would answer.
    """
    if path.endswith("/") or "//" in path:
        raise Refused("the id or name is empty: use one that `list` shows")
    return tracking_uri() + path


def call(method: str, path: str, **options: Any) -> Any:
    """The answer of the API as JSON.

    Raises:
        Refused: the API answered with an error, or an id in the path is empty.
    """
    url, headers = build_url(path), authorization_header() | options.pop("headers", {})
    options = {"timeout": TIMEOUT_SECONDS, **options}
    verify = options.pop("verify", url.startswith("https:"))
    if method == "GET":
        answer = _reading_client(verify).get(url, headers=headers, **options)
    else:
        answer = httpx.request(method, url, trust_env=False, headers=headers, verify=verify, **options)
    if answer.is_error:
        raise Refused(error_message(answer))
    try:
        return answer.json()
    except ValueError:
        raise Refused(
            f"{url} did not answer with JSON: another program listens there, correct HANZO_ML_TRACKING_URI"
        ) from None


@functools.cache
def _reading_client(verify: bool) -> httpx.Client:
    """Return a client whose connection is reused by polls.

    `kubectl port-forward` hangs after about 2,000 connections, which a poll every half second reaches in 18 minutes. Root
    certificates for verification cost 33 ms of CPU time to load, and plain HTTP needs none.
    """
    return httpx.Client(trust_env=False, verify=verify, limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS))


def iterate_pages(path: str, key: str, params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All entries of a listing under `key`, page by page. Raises Refused as `call` does."""
    following: dict[str, Any] = {}
    while True:
        page = call("GET", path, params={**params, **following})
        yield from page[key]
        if not (token := page.get("next_page_token")):
            return
        following = {"page_token": token}


def stream_lines(path: str, **options: Any) -> Iterator[str]:
    """The lines of a server-sent event stream, split at newlines only.

    Form feeds and Unicode line separators are part of a line.
    """
    url, headers = build_url(path), authorization_header()
    with httpx.stream("GET", url, timeout=None, trust_env=False, headers=headers, **options) as answer:
        if answer.is_error:
            answer.read()
            raise Refused(error_message(answer))
        begun = b""
        for part in answer.iter_bytes():
            *lines, begun = (begun + part).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)


def error_message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.request.url} answered {answer.status_code}"


MAX_ATTEMPTS = 8
"""Enough, with the pauses between attempts, to wait for a server that restarts."""
CONNECT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout)

KeyOption = Annotated[
    str | None,
    typer.Option("--key", help="Idempotency key, any text: repeating the command with the same key starts the work once."),
]


def start_once(path: str, key: str | None, **options: Any) -> Any:
    """Send a POST that starts work, retried with one idempotency key.

    Raises:
        Refused: as `call` does; or no answer came although the work may have started: the message names the key.
    """
    if key is not None and not (key.strip() and key.isascii() and key.isprintable()):
        raise Refused(f"--key {key!r} is not a valid key: use letters and digits")
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
            f"the connection to {tracking_uri()} broke ({lost}), but the work may have started: repeat the command with "
            f"`--key {sent}`, which starts it at most once"
        ) from None
