"""Access to a logical bucket through the API, for programs without store credentials.

`StoreAddress.root` is then `api+http://HOST:PORT/v1/jobs/{job_id}/programs/{program}/objects`. The program's token is in
MLFLOW_TRACKING_TOKEN, the number of its attempt in HANZO_ML_ATTEMPT.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.contracts.job import StoreAddress
from recipes.storage.bucket_operations import ObjectHead
from recipes.storage.buckets import StoreRefuses, StoreUnavailable
from recipes.storage.object_api import (
    CONNECTION_ERRORS,
    AddressExpired,
    ObjectApi,
    Response,
    TransientFailure,
    describe,
    retried,
)
from recipes.storage.object_transfer import READ_CHUNK_BYTES
from recipes.storage.signed_upload import COMMIT_BYTES, commit, put_whole, upload_in_parts

TOKEN_VARIABLE = "MLFLOW_TRACKING_TOKEN"
ATTEMPT_VARIABLE = "HANZO_ML_ATTEMPT"
EXPIRY_MARGIN_SECONDS = 60.0
MAX_CACHED_ADDRESSES = 10_000
ADDRESSES_PER_CALL = 500
MAX_BROKEN_READS = 5
"""Maximum consecutive connections that break without delivering a byte."""


def open_signed_bucket(name: str, address: StoreAddress, variables: Mapping[str, str]) -> "SignedBucket":
    """Open a logical bucket with token and attempt from `variables` or the environment.

    Raises:
        StoreRefuses: there is no token.
    """
    known = {**os.environ, **variables}
    token = known.get(TOKEN_VARIABLE)
    if not token:
        raise StoreRefuses(f"{address.root}: set {TOKEN_VARIABLE} to the token of the program")
    return SignedBucket(name, ObjectApi(address.root.removeprefix("api+"), token, known.get(ATTEMPT_VARIABLE, "0")))


@dataclass(frozen=True)
class ReadAddress:
    url: str
    headers: Mapping[str, str]
    expires_at: float


class SignedBucket:
    """Implements `recipes.storage.bucket_operations.BucketOperations`."""

    reads_in_parallel = True

    def __init__(self, name: str, api: ObjectApi) -> None:
        self._name = name
        self._api = api
        self._addresses: dict[str, ReadAddress] = {}

    def put(self, uri: str, key: str, data: bytes) -> None:
        if len(data) <= COMMIT_BYTES:
            commit(self._api, self._uri(key), data)
        else:
            put_whole(self._api, self._uri(key), data)

    def put_file(self, uri: str, key: str, path: Path, parts_at_once: int) -> None:
        if path.stat().st_size <= COMMIT_BYTES:
            commit(self._api, self._uri(key), path.read_bytes())
        else:
            upload_in_parts(self._api, self._uri(key), path, parts_at_once)

    async def put_stream(self, uri: str, key: str, chunks: AsyncIterator[bytes], size: int | None) -> None:
        with tempfile.NamedTemporaryFile() as spool:
            async for chunk in chunks:
                spool.write(chunk)
            spool.flush()
            await asyncio.to_thread(self.put_file, uri, key, Path(spool.name), 2)

    def copy(self, uri: str, key: str, new_uri: str, new_key: str) -> None:
        self._api.call(uri, "copy", {"source": self._uri(key), "uri": self._uri(new_key)})

    def head(self, uri: str, key: str) -> ObjectHead:
        place = self._uri(key)
        [found] = self._api.call(uri, "head", {"uris": [place]})["objects"]
        if found is None:
            raise FileNotFoundError(f"there is no object at {uri}")
        self._remember(place, found["address"])
        return ObjectHead(found["size"], found["version"], found["modified_ms"])

    def read(self, uri: str, key: str, start: int, stop: int, version: str) -> Iterator[bytes]:
        place = self._uri(key)
        response = self._get(uri, place, start, stop, version)
        return self._stream(uri, place, response, start, stop, version)

    def prepare_reads(self, uris: Sequence[str]) -> None:
        now = time.monotonic()
        missing = [uri for uri in uris if (known := self._addresses.get(uri)) is None or known.expires_at <= now]
        for start in range(0, len(missing), ADDRESSES_PER_CALL):
            batch = missing[start : start + ADDRESSES_PER_CALL]
            for place, address in zip(batch, self._api.call(batch[0], "addresses", {"reads": batch})["reads"], strict=True):
                self._remember(place, address)

    def entries(self, uri: str, key: str) -> list[tuple[str, int]]:
        listed = self._api.call(uri, "list", {"uri": self._uri(key)})["objects"]
        return [(entry["uri"].removeprefix(f"s3://{self._name}/"), entry["size"]) for entry in listed]

    def list_folder(self, uri: str, key: str) -> tuple[list[tuple[str, int]], list[str]]:
        found = self._api.call(uri, "list", {"uri": self._uri(key), "recursive": False})
        files = [(entry["uri"].rpartition("/")[2], entry["size"]) for entry in found["objects"]]
        return files, [folder.rpartition("/")[2] for folder in found["folders"]]

    def remove(self, uri: str, key: str) -> None:
        self._api.call(uri, "delete", {"uris": [self._uri(key)]})

    def signed_url(self, uri: str, key: str, seconds: int) -> str | None:
        """Programs cannot create addresses."""
        return None

    def require_mounted(self, uri: str) -> None:
        """Checked by the server."""

    def _uri(self, key: str) -> str:
        return f"s3://{self._name}/{key}"

    def _get(self, uri: str, place: str, start: int, stop: int, version: str) -> Response:
        """Return the response to a ranged GET, body unread; an expired address is renewed once."""
        wanted = {"Range": f"bytes={start}-{stop - 1}", **({"If-Match": version} if version else {})}

        def once() -> Response:
            address = self._address(uri, place)
            return self._api.send("GET", address.url, {**address.headers, **wanted}, None, uri)

        try:
            return retried(once)
        except AddressExpired:
            self._addresses.pop(place, None)
        try:
            return retried(once)
        except AddressExpired as error:
            raise StoreRefuses(str(error)) from None

    def _stream(self, uri: str, place: str, response: Response, start: int, stop: int, version: str) -> Iterator[bytes]:
        """Yield the body in chunks.

        A broken connection is replaced, for the rest of the same version.
        """
        position, failures = start, 0
        try:
            while position < stop:
                try:
                    chunk = response.read(min(READ_CHUNK_BYTES, stop - position))
                    if not chunk:
                        raise TransientFailure(f"it ended {stop - position} bytes too early")
                except (*CONNECTION_ERRORS, TransientFailure) as error:
                    response.close()
                    failures += 1
                    if not version or failures > MAX_BROKEN_READS:
                        raise StoreUnavailable(f"{uri}: the connection broke: {describe(error)}") from error
                    response = self._get(uri, place, position, stop, version)
                    continue
                position, failures = position + len(chunk), 0
                yield chunk
        finally:
            if position < stop:  # otherwise the connection is free already
                response.close()

    def _address(self, uri: str, place: str) -> ReadAddress:
        known = self._addresses.get(place)
        if known is not None and known.expires_at > time.monotonic():
            return known
        [address] = self._api.call(uri, "addresses", {"reads": [place]})["reads"]
        return self._remember(place, address)

    def _remember(self, place: str, address: Mapping[str, Any]) -> ReadAddress:
        if len(self._addresses) >= MAX_CACHED_ADDRESSES:
            self._addresses.clear()
        expires_at = time.monotonic() + address["expires_in"] - EXPIRY_MARGIN_SECONDS
        self._addresses[place] = ReadAddress(address["url"], address["headers"], expires_at)
        return self._addresses[place]
