"""Objects by logical URI: atomic puts and streaming reads with constant memory.

Artifacts and manifests are in `recipes.storage.artifact_store`, parallel transfers in `recipes.storage.object_transfer`.
"""

import hashlib
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from recipes.contracts.job import StoreAddress
from recipes.storage.bucket_operations import BucketOperations, ObjectHead
from recipes.storage.buckets import ObjectReplaced, StoreUnavailable, open_bucket
from recipes.storage.locations import Location, is_api_address, local_store_root, refuse_symlinks, resolve_uri
from recipes.storage.object_transfer import PREFETCH_RANGES, StoredObject
from recipes.storage.obstore_bucket import ObstoreBucket

MAX_REPLACEMENTS = 1000
"""Maximum replacements during a read: with a store that ignores the requested version the loop would never end."""
CONCURRENT_FILES = 4
"""Number of an artifact's files transferred at once, each in parallel parts: 16 parts of 8 MB in flight. On connections of
10 MB/s that took an eighth of the time of sequential transfers (`benchmarks.artifact_transfer`).
"""
MD5_ETAG = re.compile(r'"(?P<md5>[0-9a-f]{32})"')
"""ETag that is the MD5 of the content."""


@dataclass(frozen=True)
class ObjectEntry:
    uri: str
    size: int


class ObjectStore:
    """Objects at a `StoreAddress`.

    Args:
        variables: AWS variables (`AWS_ACCESS_KEY_ID`, ...) that override those of the environment. They are no part of the
            address, because addresses travel in jobs, which hold no secrets.
    """

    def __init__(self, address: StoreAddress, variables: Mapping[str, str] | None = None) -> None:
        self.address = address
        self._variables = dict(variables or {})
        self._root = local_store_root(address)
        self._buckets: dict[tuple[str, str], BucketOperations] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[StoreAddress, Mapping[str, str]]]:
        """Pickle address and credentials only; the other process opens its own buckets."""
        return type(self), (self.address, self._variables)

    def put_bytes(self, uri: str, data: bytes) -> None:
        bucket, key = self._resolve(uri)
        bucket.put(uri, key, data)

    def put_file(self, uri: str, path: Path, parts_at_once: int = PREFETCH_RANGES) -> None:
        """Store a file, in parts if it is large.

        Needs about 8 MB of memory per concurrent part.
        """
        bucket, key = self._resolve(uri)
        bucket.put_file(uri, key, path, parts_at_once)

    @property
    def concurrent_files(self) -> int:
        """Number of files to transfer at once.

        1 for a folder, where a disk gains nothing by more.
        """
        return CONCURRENT_FILES if self._root is None else 1

    def copy(self, source: str, uri: str) -> None:
        """Copy an object within the store; in a folder the copy takes no space.

        Raises:
            FileNotFoundError: there is no object at `source`.
            StoreUnavailable: the store does not answer, or the object is too large: S3 copies up to 5 GB.
        """
        (bucket, key), (_, new_key) = self._resolve(source), self._resolve(uri)
        if self._location(source).bucket != self._location(uri).bucket:
            raise StoreUnavailable(f"{uri}: its bucket is not that of {source}")
        bucket.copy(source, key, uri, new_key)

    async def put_stream(self, uri: str, chunks: AsyncIterator[bytes], size: int | None = None) -> None:
        """Store a stream atomically.

        An error of `chunks` is raised here and leaves nothing behind.

        Args:
            size: total size if known; otherwise S3 accepts at most 140 GB.
        """
        bucket, key = self._resolve(uri)
        await bucket.put_stream(uri, key, chunks, size)

    def get_bytes(self, uri: str) -> bytes:
        """Read an object atomically, again if it is replaced meanwhile.

        Raises FileNotFoundError if there is none. A list of incidents that was replaced during a read was once taken for
        missing, and restarted.
        """
        for _ in range(MAX_REPLACEMENTS):
            with suppress(ObjectReplaced):
                return b"".join(self.open(uri).chunks())
        return b"".join(self.open(uri).chunks())

    def head(self, uri: str) -> ObjectHead:
        """Return metadata of the object at `uri`. Raises FileNotFoundError."""
        bucket, key = self._resolve(uri)
        return bucket.head(uri, key)

    def open(self, uri: str) -> StoredObject:
        """Open the current object at `uri`. Raises FileNotFoundError."""
        bucket, key = self._resolve(uri)
        head = bucket.head(uri, key)
        return StoredObject(uri, head.size, head.version, bucket, key)

    def open_known_size(self, uri: str, size: int) -> StoredObject:
        """Open an object whose size is known from a manifest, without a request.

        Each read is a single request for the object's current content and raises FileNotFoundError if there is none.
        """
        bucket, key = self._resolve(uri)
        return StoredObject(uri, size, "", bucket, key)

    def prepare_reads(self, uris: Sequence[str]) -> None:
        """Hint that objects of one bucket will be read soon; URIs must be normalized."""
        if uris:
            self._resolve(uris[0])[0].prepare_reads(uris)

    def has_content(self, uri: str, data: bytes) -> bool:
        """Return whether an object has this content already, without sending it.

        In a folder the content is compared. S3 returns the MD5 of single-request puts, but not with KMS keys; otherwise only
        the size is compared.
        """
        try:
            found = self.open(uri)
            if found.size != len(data):
                return False
            if self._root is not None:
                return b"".join(found.chunks()) == data
        except FileNotFoundError:  # missing, or removed or replaced during the read
            return False
        known = None if self.address.encryption == "aws:kms" else MD5_ETAG.fullmatch(found.version)
        return known is None or known["md5"] == hashlib.md5(data, usedforsecurity=False).hexdigest()

    def size(self, uri: str) -> int:
        """Return the object's size in bytes. Raises FileNotFoundError."""
        return self.open(uri).size

    def modified_ms(self, uri: str) -> int:
        """Return the object's modification time in milliseconds since 1970. Raises FileNotFoundError."""
        return self.head(uri).modified_ms

    def sha256(self, uri: str) -> str:
        """Return the SHA-256 of the object's current content. Raises FileNotFoundError."""
        return self.open(uri).sha256()

    def signed_url(self, uri: str, seconds: int) -> str | None:
        """Return a URL that reads the object without credentials for a while.

        None for a folder.
        """
        bucket, key = self._resolve(uri)
        return bucket.signed_url(uri, key, seconds)

    def entries(self, uri: str) -> list[ObjectEntry]:
        """Return all objects below `uri`, sorted by name, excluding `uri` itself."""
        bucket, key = self._resolve(uri)
        logical = logical_bucket(uri)
        below = (ObjectEntry(f"s3://{logical}/{path}", size) for path, size in bucket.entries(uri, key))
        return sorted(below, key=lambda entry: entry.uri)

    def list_folder(self, uri: str) -> tuple[list[ObjectEntry], list[str]]:
        """Return the objects directly below `uri`, and the URIs of folders there, without their contents."""
        bucket, key = self._resolve(uri)
        files, folders = bucket.list_folder(uri, key)
        place = uri.rstrip("/")
        named = [ObjectEntry(f"{place}/{name}", size) for name, size in sorted(files)]
        return named, [f"{place}/{name}" for name in sorted(folders)]

    def list(self, uri: str) -> list[str]:
        """Return the logical URIs of all objects below `uri`, sorted."""
        return [entry.uri for entry in self.entries(uri)]

    def exists(self, uri: str) -> bool:
        """Return whether there is an object at or below `uri`."""
        try:
            self.open(uri)
        except FileNotFoundError:
            return any(self.list_folder(uri))
        return True

    def require_mounted_bucket(self, uri: str) -> None:
        """Check that a folder is mounted, for callers that access `local_path` directly. Raises StoreUnavailable."""
        self._resolve(uri)[0].require_mounted(uri)

    def remove(self, uri: str) -> None:
        """Delete the object at `uri` if it exists."""
        bucket, key = self._resolve(uri)
        bucket.remove(uri, key)

    def remove_empty_folders(self, uri: str) -> None:
        """Remove empty folders at and below `uri` in a folder store.

        There must be no concurrent writers. The library could remove them with each deletion, but then fails if another
        process writes there at that moment.
        """
        folder = self.local_path(uri)
        if folder is not None:
            for path, _, _ in os.walk(folder, topdown=False):
                with suppress(OSError):  # not empty
                    Path(path).rmdir()

    def local_path(self, uri: str) -> Path | None:
        """Return the local path if the store is a folder, else None."""
        location = self._location(uri)
        return None if self._root is None else self._root / location.bucket / location.key

    def _location(self, uri: str) -> Location:
        location = resolve_uri(self.address, uri)
        if self._root is not None:
            refuse_symlinks(self._root / location.bucket, location.key, uri)
        return location

    def _resolve(self, uri: str) -> tuple[BucketOperations, str]:
        location = self._location(uri)
        return self._bucket(location.bucket, logical_bucket(uri)), location.key

    def _bucket(self, name: str, logical: str) -> BucketOperations:
        if (name, logical) not in self._buckets:
            if is_api_address(self.address):
                # Imported in pods only: the HTTP client costs memory and 0.1 s per process.
                from recipes.storage.signed_bucket import open_signed_bucket

                self._buckets[name, logical] = open_signed_bucket(logical, self.address, self._variables)
            else:
                self._buckets[name, logical] = ObstoreBucket(open_bucket(name, self.address, self._variables))
        return self._buckets[name, logical]


def logical_bucket(uri: str) -> str:
    return uri.removeprefix("s3://").partition("/")[0]
