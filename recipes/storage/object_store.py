"""Objects by their logical URIs: bytes in and out, in streams whose memory does not grow with the object.

A put is whole or not at all. What does not belong here: artifacts and their manifests (`recipes.storage.artifact_store`),
and in which parts bytes travel (`recipes.storage.object_transfer`).
"""

import hashlib
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

import obstore
from obstore.exceptions import BaseError

from recipes.contracts.job import StoreAddress
from recipes.storage.buckets import (
    NO_SUCH_BUCKET,
    Bucket,
    ObjectReplaced,
    StoreUnavailable,
    list_folder,
    open_bucket,
    require_mounted_bucket,
    translate_listing_errors,
    translate_store_errors,
    walk_files,
)
from recipes.storage.locations import Location, local_store_root, refuse_symlinks, resolve_uri
from recipes.storage.object_transfer import (
    CONCURRENT_PARTS,
    MIN_PART_BYTES,
    PREFETCH_RANGES,
    RANGE_BYTES,
    StoredObject,
    chain_chunks,
    choose_part_bytes,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta

MAX_REPLACEMENTS = 1000
"""Times that an object may be replaced while it is read: a store that takes no version for the one it names never ends."""
CONCURRENT_FILES = 4
"""Of one artifact, each with its parts over connections of their own: 16 parts of 8 MB at a time. Where a connection brings
10 MB a second, that took an eighth of the time of one after the other (`benchmarks.artifact_transfer`).
"""
MD5_ETAG = re.compile(r'"(?P<md5>[0-9a-f]{32})"')
"""An ETag that tells what an object consists of."""


@dataclass(frozen=True)
class ObjectEntry:
    uri: str
    size: int


class ObjectStore:
    """Objects at a `StoreAddress`.

    Args:
        variables: AWS variables (`AWS_ACCESS_KEY_ID`, ...) that go before those of the environment. They are no part of the
            address, because addresses travel in jobs and jobs hold no secrets.
    """

    def __init__(self, address: StoreAddress, variables: Mapping[str, str] | None = None) -> None:
        self.address = address
        self._variables = dict(variables or {})
        self._root = local_store_root(address)
        self._buckets: dict[str, Bucket] = {}
        self._existing_buckets: set[str] = set()

    def __reduce__(self) -> tuple[type[Self], tuple[StoreAddress, Mapping[str, str]]]:
        """To another process goes where it is and with which keys; its buckets it opens itself."""
        return type(self), (self.address, self._variables)

    def put_bytes(self, uri: str, data: bytes) -> None:
        store, key = self._resolve(uri)
        with translate_store_errors(uri, store, writing=True):
            obstore.put(store, key, data)

    def put_file(self, uri: str, path: Path, parts_at_once: int = PREFETCH_RANGES) -> None:
        """Each part that is on its way at once takes 8 MB, of files beyond 72 GB a 9,000th of them."""
        store, key = self._resolve(uri)
        parts = max(
            RANGE_BYTES, choose_part_bytes(path.stat().st_size)
        )  # asked first: a file that is gone is no bucket that is gone
        with translate_store_errors(uri, store, writing=True):
            obstore.put(store, key, path, chunk_size=parts, max_concurrency=parts_at_once)

    @property
    def concurrent_files(self) -> int:
        """That are best on their way together: a folder is on a disk, and gains nothing by several."""
        return CONCURRENT_FILES if self._root is None else 1

    def copy(self, source: str, uri: str) -> None:
        """Make the object at `uri` the same as that at `source`: its bytes do not come here, in a folder it takes no room.

        Raises:
            FileNotFoundError: nothing lies at `source`.
            StoreUnavailable: the store does not answer, or copies nothing so large: S3 more than 5 GB.
        """
        (store, key), (target, new_key) = self._resolve(source), self._resolve(uri)
        if store is not target:
            raise StoreUnavailable(f"{uri}: its bucket is not that of {source}")
        with translate_store_errors(source, store):
            obstore.copy(store, key, new_key)

    async def put_stream(self, uri: str, chunks: AsyncIterator[bytes], size: int | None = None) -> None:
        """Store what arrives, once all of it has: whatever `chunks` raises leaves nothing behind, and is raised here.

        Args:
            size: how much will arrive, where that is known; else 140 GB is the most that S3 takes.
        """
        store, key = self._resolve(uri)
        first: list[bytes] = []
        length = 0
        async for chunk in chunks:
            first.append(chunk)
            length += len(chunk)
            if length >= MIN_PART_BYTES:
                break
        with translate_store_errors(uri, store, writing=True):
            if length < MIN_PART_BYTES:  # one request instead of three
                await obstore.put_async(store, key, b"".join(first))
                return
            await obstore.put_async(
                store, key, chain_chunks(first, chunks), chunk_size=choose_part_bytes(size), max_concurrency=CONCURRENT_PARTS
            )

    def get_bytes(self, uri: str) -> bytes:
        """What lies there now, whole. Raises FileNotFoundError when nothing does.

        Read as not there while another process replaced it, a list of incidents was begun anew.
        """
        for _ in range(MAX_REPLACEMENTS):
            with suppress(ObjectReplaced):
                return b"".join(self.open(uri).chunks())
        return b"".join(self.open(uri).chunks())

    def open(self, uri: str) -> StoredObject:
        """The object that lies at `uri` now. Raises FileNotFoundError."""
        store, key = self._resolve(uri)
        meta = self._head(uri)
        return StoredObject(uri, meta["size"], meta["e_tag"] or "", store, key)

    def open_known_size(self, uri: str, size: int) -> StoredObject:
        """The object at `uri` whose size a manifest tells. Nothing is asked: each read takes one request, of what lies there
        then, and raises FileNotFoundError where nothing does."""
        store, key = self._resolve(uri)
        return StoredObject(uri, size, "", store, key)

    def has_content(self, uri: str, data: bytes) -> bool:
        """Whether these bytes lie there already, as far as the store tells without sending them.

        A folder is read. S3 names the MD5 of what was put in one request, but not with keys of KMS; else the size decides.
        """
        try:
            found = self.open(uri)
            if found.size != len(data):
                return False
            if self._root is not None:
                return b"".join(found.chunks()) == data
        except FileNotFoundError:  # or gone, or replaced, while it was read
            return False
        known = None if self.address.encryption == "aws:kms" else MD5_ETAG.fullmatch(found.version)
        return known is None or known["md5"] == hashlib.md5(data, usedforsecurity=False).hexdigest()

    def size(self, uri: str) -> int:
        """Raises FileNotFoundError."""
        return self.open(uri).size

    def modified_ms(self, uri: str) -> int:
        """When the object came there, in milliseconds since 1970. Raises FileNotFoundError."""
        return int(self._head(uri)["last_modified"].timestamp() * 1000)

    def _head(self, uri: str) -> "ObjectMeta":
        """What is known of an object without reading it. Raises FileNotFoundError."""
        store, key = self._resolve(uri)
        with translate_store_errors(uri, store):
            try:
                return obstore.head(store, key)
            except FileNotFoundError:
                self._require_bucket(uri)
                raise

    def _require_bucket(self, uri: str) -> None:
        """Once for each: to a HEAD, S3 says of a bucket that is not there what it says of an object that is not.

        Raises what the library does, which names the bucket, where it is not there.
        """
        store, key = self._resolve(uri)
        name = self._location(uri).bucket
        if self._root is None and name not in self._existing_buckets:
            try:
                next(iter(obstore.list(store, prefix=key)), None)
            except BaseError as error:  # keys that may not list tell nothing of it
                if NO_SUCH_BUCKET in str(error):
                    raise
            self._existing_buckets.add(name)

    def sha256(self, uri: str) -> str:
        """SHA-256 of the bytes that lie at `uri` now. Raises FileNotFoundError."""
        return self.open(uri).sha256()

    def signed_url(self, uri: str, seconds: int) -> str | None:
        """An address under which whoever has it reads the object for a while; None where the store is a folder."""
        store, key = self._resolve(uri)
        if self._root is not None:
            return None
        with translate_store_errors(uri, store):
            return str(obstore.sign(store, "GET", key, expires_in=timedelta(seconds=seconds)))

    def entries(self, uri: str, after: str | None = None) -> list[ObjectEntry]:
        """All objects below `uri`, in the order of their names; one that lies at `uri` itself is not among them.

        With `after`, the URI of an object, only those that follow it: the store lists no others.
        """
        store, key = self._resolve(uri)
        logical = uri.removeprefix("s3://").partition("/")[0]
        if self._root is not None:
            bucket = self._root / self._location(uri).bucket
            with translate_listing_errors(uri, store):
                found = [(path.relative_to(bucket).as_posix(), size) for path, size in walk_files(bucket / key)]
            listed = (ObjectEntry(f"s3://{logical}/{path}", size) for path, size in found)
            return sorted((entry for entry in listed if after is None or entry.uri > after), key=lambda entry: entry.uri)
        with translate_store_errors(uri, store):
            offset = None if after is None else self._resolve(after)[1]
            metas = [meta for batch in obstore.list(store, prefix=key, offset=offset) for meta in batch]
        below = (ObjectEntry(f"s3://{logical}/{meta['path']}", meta["size"]) for meta in metas if meta["path"] != key)
        return sorted(below, key=lambda entry: entry.uri)

    def list_folder(self, uri: str) -> tuple[list[ObjectEntry], list[str]]:
        """The objects directly below `uri`, and the URIs of the folders there: what lies in those is not listed."""
        store, key = self._resolve(uri)
        place = uri.rstrip("/")
        if self._root is not None:
            with translate_listing_errors(uri, store):
                files, folders = list_folder(self._root / self._location(uri).bucket / key)
        else:
            with translate_store_errors(uri, store):
                found = obstore.list_with_delimiter(store, prefix=key)
            files = [(meta["path"].rpartition("/")[2], meta["size"]) for meta in found["objects"] if meta["path"] != key]
            folders = [prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]]
        named = [ObjectEntry(f"{place}/{name}", size) for name, size in sorted(files)]
        return named, [f"{place}/{name}" for name in sorted(folders)]

    def list(self, uri: str) -> list[str]:
        """Logical URIs of all objects below `uri`, in the order of their names."""
        return [entry.uri for entry in self.entries(uri)]

    def exists(self, uri: str) -> bool:
        """Whether an object, or anything below it, lies at `uri`."""
        try:
            self.open(uri)
        except FileNotFoundError:
            return any(self.list_folder(uri))
        return True

    def require_mounted_bucket(self, uri: str) -> None:
        """For whoever reads what lies at `local_path` itself, and did not find it. Raises StoreUnavailable."""
        require_mounted_bucket(uri, self._resolve(uri)[0])

    def remove(self, uri: str) -> None:
        """Delete the object at `uri`, if there is one."""
        store, key = self._resolve(uri)
        with suppress(FileNotFoundError), translate_store_errors(uri, store):
            obstore.delete(store, key)

    def remove_empty_folders(self, uri: str) -> None:
        """Where the store is a folder, those at and below `uri`, which nobody may write to meanwhile: deletions leave them.

        The library would remove them itself, and fails then on what another puts beside it at that moment.
        """
        folder = self.local_path(uri)
        if folder is not None:
            for path, _, _ in os.walk(folder, topdown=False):
                with suppress(OSError):  # something lies in it
                    Path(path).rmdir()

    def local_path(self, uri: str) -> Path | None:
        """The folder or file itself where the store is a folder, else None."""
        location = self._location(uri)
        return None if self._root is None else self._root / location.bucket / location.key

    def _location(self, uri: str) -> Location:
        location = resolve_uri(self.address, uri)
        if self._root is not None:
            refuse_symlinks(self._root / location.bucket, location.key, uri)
        return location

    def _resolve(self, uri: str) -> tuple[Bucket, str]:
        location = self._location(uri)
        return self._bucket(location.bucket), location.key

    def _bucket(self, name: str) -> Bucket:
        if name not in self._buckets:
            self._buckets[name] = open_bucket(name, self.address, self._variables)
        return self._buckets[name]
