"""Uploads without store credentials: small objects through the API, others to signed addresses.

Large files are uploaded in parts. Each request carries the SHA-256 of its bytes, so that corrupted bytes are rejected. An
object becomes visible only when it is complete.
"""

import hashlib
import mmap
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

from recipes.storage.buckets import StoreRefuses, StoreUnavailable
from recipes.storage.checksums import hash_file
from recipes.storage.object_api import AddressExpired, ObjectApi, Response, retried
from recipes.storage.object_transfer import RANGE_BYTES, choose_part_bytes, prefetch

COMMIT_BYTES = 1 << 20
"""Objects up to this size are sent through the API, in one request instead of two."""
UPLOAD_ATTEMPTS = 2
"""Attempts of a multipart upload that the store no longer knows, because it was aborted or the response was lost."""

Address = Mapping[str, Any]
"""`api.schemas.v1.job_objects.Address` as JSON."""


class NotSigned(Exception):
    """The API returned no address for this object: it must be written through the API."""


def commit(api: ObjectApi, uri: str, data: bytes) -> None:
    """Store an object through the API, which refuses older attempts."""
    query = urlencode({"uri": uri, "sha256": hashlib.sha256(data).hexdigest()})
    retried(lambda: api.send("PUT", f"content?{query}", {}, data, uri))


def put_whole(api: ObjectApi, uri: str, data: bytes) -> None:
    """Store an object in one request; through the API if it must check the attempt.

    Raises:
        StoreRefuses: the bucket does not exist, or two addresses were refused.
    """
    wanted = {"writes": [{"uri": uri, "sha256": hashlib.sha256(data).hexdigest()}]}

    def ask() -> Address:
        [address] = api.call(uri, "addresses", wanted)["writes"]
        if address is None:
            raise NotSigned
        return cast(Address, address)

    try:
        put_at_address(api, uri, data, ask)
    except NotSigned:
        commit(api, uri, data)
    except FileNotFoundError as error:
        raise StoreRefuses(f"{uri}: its bucket does not exist") from error


def put_at_address(api: ObjectApi, uri: str, data: bytes, ask: Callable[[], Address]) -> Response:
    """Send bytes to a signed address; an expired one is renewed once."""
    for retries_left in (1, 0):
        address = ask()
        try:
            return retried(partial(api.send, "PUT", address["url"], address["headers"], data, uri))
        except AddressExpired as error:
            if not retries_left:
                raise StoreRefuses(str(error)) from None
    raise AssertionError


def upload_in_parts(api: ObjectApi, uri: str, path: Path, parts_at_once: int) -> None:
    """Store a file in concurrent parts; in one request if the store is a folder."""
    for _ in range(UPLOAD_ATTEMPTS):
        upload_id = api.call(uri, "uploads", {"uri": uri})["upload_id"]
        if upload_id is None:
            put_file_whole(api, uri, path)
            return
        try:
            upload_parts(api, uri, path, upload_id, parts_at_once)
            return
        except FileNotFoundError:
            if not path.exists():
                raise
        except BaseException:
            with suppress(Exception):  # the original error counts; leftovers are removed after a day
                api.call(uri, "uploads/abort", {"uri": uri, "upload_id": upload_id})
            raise
    raise StoreUnavailable(f"{uri}: the upload was lost: it was aborted by another process")


def upload_parts(api: ObjectApi, uri: str, path: Path, upload_id: str, parts_at_once: int) -> None:
    """Upload and complete all parts.

    Raises FileNotFoundError: the store no longer has the upload, or the file is missing.
    """
    size = path.stat().st_size
    part_bytes = max(RANGE_BYTES, choose_part_bytes(size))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:

        def send(start: int) -> dict[str, Any]:
            data = content[start : start + part_bytes]
            number, sha256 = start // part_bytes + 1, hashlib.sha256(data).hexdigest()
            wanted = {"uri": uri, "upload_id": upload_id, "parts": [{"number": number, "sha256": sha256}]}

            def ask() -> Address:
                return cast(Address, api.call(uri, "uploads/parts", wanted)["parts"][0])

            etag = put_at_address(api, uri, data, ask).headers["ETag"]
            return {"number": number, "etag": etag, "sha256": sha256}

        parts = list(prefetch(send, range(0, size, part_bytes), parts_at_once))
    api.call(uri, "uploads/complete", {"uri": uri, "upload_id": upload_id, "parts": parts})


def put_file_whole(api: ObjectApi, uri: str, path: Path) -> None:
    query = urlencode({"uri": uri, "sha256": hash_file(path)})
    size = str(path.stat().st_size)

    def send() -> None:
        with path.open("rb") as file:
            api.send("PUT", f"content?{query}", {"Content-Length": size}, file, uri)

    retried(send)
