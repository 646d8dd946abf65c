"""HTTP requests for objects behind the API, with retries and the errors of other stores.

The API locates objects and returns signed addresses; bytes travel directly between this process and the object store.
Uses urllib3 instead of httpx, which transfers bodies at a fraction of its speed; these are checkpoints.
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeVar

import urllib3
from tenacity import Retrying, retry_if_exception_type
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, LocationParseError

from recipes.storage.buckets import NO_SPACE_SUFFIX, ObjectReplaced, StoreFull, StoreRefuses, StoreUnavailable
from recipes.storage.retry import with_backoff

OUTAGE_SECONDS = 180.0
"""How long requests to an unavailable API or object store are retried; obstore's limit."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 15.0
CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
API_READ_SECONDS = 300.0
"""For responses of the API, which itself waits for the object store."""
SILENCE_SECONDS = 30
"""Time without acknowledgement after which a peer counts as dead."""
CONNECTIONS = 32
BLOCK_BYTES = 1 << 20
TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
CHECKSUM_MISMATCH, DOES_NOT_EXIST, DENIED = "CHECKSUM_MISMATCH", "RESOURCE_DOES_NOT_EXIST", "STORAGE_DENIED"
BAD_DIGEST = b"BadDigest"
CONNECTION_ERRORS = (HTTPError, OSError)

T = TypeVar("T")
Body = bytes | IO[bytes] | None
Response = urllib3.BaseHTTPResponse


class TransientFailure(StoreUnavailable):
    """A request may succeed when it is repeated."""


class AddressExpired(Exception):
    """The object store no longer accepts a signed address."""


class ObjectApi:
    """Requests to the object routes of one program, and to the addresses that they return.

    Args:
        base: address of the routes, up to and including `objects`.
        token: the program's token.
        attempt: number of the program's attempt; the API refuses writes of older attempts.
    """

    def __init__(self, base: str, token: str, attempt: str) -> None:
        self.base = base.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Hanzo-ML-Attempt": attempt}
        self._lock = threading.Lock()
        self._pools: dict[int, urllib3.PoolManager] = {}

    def call(self, uri: str, route: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON response to a POST.

        Raises:
            FileNotFoundError: there is no object at the URI.
            StoreRefuses: the token or the operation is refused.
            StoreFull: no space is left.
            StoreUnavailable: the API or the object store did not answer for `OUTAGE_SECONDS`.
        """
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}

        def once() -> Any:
            return self._request("POST", f"{self.base}/{route}", headers, data, uri, preload=True).json()

        return retried(once)

    def send(self, method: str, url: str, headers: Mapping[str, str], body: Body, uri: str) -> Response:
        """Send one request to an address from the API, without retries.

        For GET the body is not read yet.

        Raises:
            TransientFailure: it may succeed when it is repeated.
            AddressExpired: a new address is needed.
            FileNotFoundError, ObjectReplaced, StoreRefuses, StoreFull, StoreUnavailable: as in `call`.
        """
        return self._request(method, self.absolute(url), headers, body, uri, preload=method != "GET")

    def absolute(self, url: str) -> str:
        return url if "://" in url else f"{self.base}/{url}"

    def _request(
        self, method: str, url: str, headers: Mapping[str, str], body: Body, uri: str, *, preload: bool
    ) -> Response:
        is_api = url.startswith(f"{self.base}/")
        own = self._headers if is_api else {}
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=API_READ_SECONDS if is_api else READ_SECONDS)
        try:
            response = self._pool.request(
                method,
                url,
                headers={**headers, **own},
                body=body,
                timeout=timeout,
                preload_content=preload,
                decode_content=False,
                redirect=False,
                retries=False,
            )
            if response.status >= 300 and not preload:
                response.read(cache_content=True)  # otherwise `data` is empty afterwards
        except LocationParseError as error:
            raise StoreUnavailable(f"{uri}: the address {self.base} is not valid: {error}") from None
        except CONNECTION_ERRORS as error:
            where = self.base.partition("/v1/")[0] if is_api else url.partition("?")[0]
            raise TransientFailure(f"{uri}: {where} does not answer: {describe(error)}") from error
        if response.status >= 300:
            raise api_error(uri, response) if is_api else store_error(uri, response)
        return response

    @property
    def _pool(self) -> urllib3.PoolManager:
        """This process's connections: after a fork, both processes would read from the same sockets."""
        with self._lock:
            if os.getpid() not in self._pools:
                self._pools = {os.getpid(): open_pool()}
            return self._pools[os.getpid()]


def open_pool() -> urllib3.PoolManager:
    """Open connections that detect a dead peer by keepalive.

    It sends no FIN, and a response may take minutes.
    """
    options = [
        *HTTPConnection.default_socket_options,
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS // 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000),
    ]
    return urllib3.PoolManager(num_pools=8, maxsize=CONNECTIONS, blocksize=BLOCK_BYTES, socket_options=options)


def retried(work: Callable[[], T]) -> T:
    """Return the result of `work`, retrying after a TransientFailure for `OUTAGE_SECONDS`."""
    schedule = with_backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, OUTAGE_SECONDS)
    return Retrying(retry=retry_if_exception_type(TransientFailure), **schedule)(work)


def api_error(uri: str, response: Response) -> Exception:
    """Return the error for a response of the API."""
    code, message = error_fields(response.data)
    status = response.status
    if status == 404 and code == DOES_NOT_EXIST:
        return FileNotFoundError(f"there is no object at {uri}")
    if status == 412:
        return ObjectReplaced(f"{uri} was replaced while it was read")
    if status == 507:
        return StoreFull(uri + NO_SPACE_SUFFIX)
    if code == DENIED:  # refused to the API by the object store: its operator has to act, retries do not help
        return StoreRefuses(f"{uri}: {message}")
    if status in TRANSIENT_STATUSES or code == CHECKSUM_MISMATCH:
        return TransientFailure(f"{uri}: the API answers {status}: {message}")
    if status in (401, 403, 409):
        return StoreRefuses(f"{uri}: the API refuses with {status}: {message}")
    return StoreUnavailable(f"{uri}: the API answers {status}: {message}")


def store_error(uri: str, response: Response) -> Exception:
    """Return the error for a response of the object store to a signed request."""
    status, text = response.status, " ".join(response.data[:500].decode(errors="replace").split())
    if status == 404:
        return FileNotFoundError(f"there is no object at {uri}")
    if status == 412:
        return ObjectReplaced(f"{uri} was replaced while it was read")
    if status == 507:
        return StoreFull(uri + NO_SPACE_SUFFIX)
    if status in (401, 403):
        keys = "settings storage.access_key, storage.secret_key of the API"
        return AddressExpired(f"{uri}: the object store refuses the signed address with {status}: {text} ({keys})")
    if status in TRANSIENT_STATUSES or BAD_DIGEST in response.data:
        return TransientFailure(f"{uri}: the object store answers {status}: {text}")
    return StoreUnavailable(f"{uri}: the object store answers {status}: {text}")


def error_fields(data: bytes) -> tuple[str, str]:
    """Return code and message of an API error.

    For a proxy's error page, the code is empty and the message its first words.
    """
    try:
        found = json.loads(data)
        return str(found["error_code"]), str(found["message"])
    except (ValueError, KeyError, TypeError):
        return "", data[:200].decode(errors="replace")


def describe(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
