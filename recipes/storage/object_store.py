"""Objects by their logical URIs: bytes in and out, in streams whose memory does not grow with the object.

A put is whole or not at all. What does not belong here: artifacts and their manifests (`recipes.storage.artifact_store`),
and in which parts bytes travel (`recipes.storage.object_transfer`).
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
        self._buckets: dict[tuple[str, str], BucketOperations] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[StoreAddress, Mapping[str, str]]]:
        """To another process goes where it is and with which keys; its buckets it opens itself."""
        return type(self), (self.address, self._variables)

    def put_bytes(self, uri: str, data: bytes) -> None:
        bucket, key = self._resolve(uri)
        bucket.put(uri, key, data)

    def put_file(self, uri: str, path: Path, parts_at_once: int = PREFETCH_RANGES) -> None:
        """Store a file, in parts where it is large. Memory: about 8 MB for each concurrent part."""
        bucket, key = self._resolve(uri)
        bucket.put_file(uri, key, path, parts_at_once)

    @property
    def concurrent_files(self) -> int:
        """Number of files to transfer at the same time: a folder is on a disk, and gains nothing by several."""
        return CONCURRENT_FILES if self._root is None else 1

    def copy(self, source: str, uri: str) -> None:
        """Make the object at `uri` the same as that at `source`: its bytes do not come here, in a folder it takes no room.

        Raises:
            FileNotFoundError: nothing lies at `source`.
            StoreUnavailable: the store does not answer, or copies nothing so large: S3 more than 5 GB.
        """
        (bucket, key), (_, new_key) = self._resolve(source), self._resolve(uri)
        if self._location(source).bucket != self._location(uri).bucket:
            raise StoreUnavailable(f"{uri}: its bucket is not that of {source}")
        bucket.copy(source, key, uri, new_key)

    async def put_stream(self, uri: str, chunks: AsyncIterator[bytes], size: int | None = None) -> None:
        """Store what arrives, once all of it has: whatever `chunks` raises leaves nothing behind, and is raised here.

        Args:
            size: how much will arrive, where that is known; else 140 GB is the most that S3 takes.
        """
        bucket, key = self._resolve(uri)
        await bucket.put_stream(uri, key, chunks, size)

    def get_bytes(self, uri: str) -> bytes:
        """What lies there now, whole. Raises FileNotFoundError when nothing does.

        Read as not there while another process replaced it, a list of incidents was begun anew.
        """
        for _ in range(MAX_REPLACEMENTS):
            with suppress(ObjectReplaced):
                return b"".join(self.open(uri).chunks())
        return b"".join(self.open(uri).chunks())

    def head(self, uri: str) -> ObjectHead:
        """What is known of the object at `uri` without reading it. Raises FileNotFoundError."""
        bucket, key = self._resolve(uri)
        return bucket.head(uri, key)

    def open(self, uri: str) -> StoredObject:
        """The object that lies at `uri` now. Raises FileNotFoundError."""
        bucket, key = self._resolve(uri)
        head = bucket.head(uri, key)
        return StoredObject(uri, head.size, head.version, bucket, key)

    def open_known_size(self, uri: str, size: int) -> StoredObject:
        """The object at `uri` whose size a manifest tells. Nothing is asked: each read takes one request, of what lies there
        then, and raises FileNotFoundError where nothing does."""
        bucket, key = self._resolve(uri)
        return StoredObject(uri, size, "", bucket, key)

    def prepare_reads(self, uris: Sequence[str]) -> None:
        """A hint: these objects of one bucket will be read soon, one by one. Their URIs are in their one form."""
        if uris:
            self._resolve(uris[0])[0].prepare_reads(uris)

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
        return self.head(uri).modified_ms

    def sha256(self, uri: str) -> str:
        """SHA-256 of the bytes that lie at `uri` now. Raises FileNotFoundError."""
        return self.open(uri).sha256()

    def signed_url(self, uri: str, seconds: int) -> str | None:
        """An address under which whoever has it reads the object for a while; None where the store is a folder."""
        bucket, key = self._resolve(uri)
        return bucket.signed_url(uri, key, seconds)

    def entries(self, uri: str) -> list[ObjectEntry]:
        """All objects below `uri`, in the order of their names; one that lies at `uri` itself is not among them."""
        bucket, key = self._resolve(uri)
        logical = logical_bucket(uri)
        below = (ObjectEntry(f"s3://{logical}/{path}", size) for path, size in bucket.entries(uri, key))
        return sorted(below, key=lambda entry: entry.uri)

    def list_folder(self, uri: str) -> tuple[list[ObjectEntry], list[str]]:
        """The objects directly below `uri`, and the URIs of the folders there: what lies in those is not listed."""
        bucket, key = self._resolve(uri)
        files, folders = bucket.list_folder(uri, key)
        place = uri.rstrip("/")
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
        self._resolve(uri)[0].require_mounted(uri)

    def remove(self, uri: str) -> None:
        """Delete the object at `uri`, if there is one."""
        bucket, key = self._resolve(uri)
        bucket.remove(uri, key)

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

    def _resolve(self, uri: str) -> tuple[BucketOperations, str]:
        location = self._location(uri)
        return self._bucket(location.bucket, logical_bucket(uri)), location.key

    def _bucket(self, name: str, logical: str) -> BucketOperations:
        if (name, logical) not in self._buckets:
            if is_api_address(self.address):
                # Loaded by pods alone: its HTTP client takes memory and 0.1 s of each process.
                from recipes.storage.signed_bucket import open_signed_bucket

                self._buckets[name, logical] = open_signed_bucket(logical, self.address, self._variables)
            else:
                self._buckets[name, logical] = ObstoreBucket(open_bucket(name, self.address, self._variables))
        return self._buckets[name, logical]


def logical_bucket(uri: str) -> str:
    return uri.removeprefix("s3://").partition("/")[0]
