"""Interface of buckets: folders and S3 (`obstore_bucket`), and objects behind the API (`signed_bucket`).

`uri` is the logical URI used in errors, `key` the object in the bucket. All methods raise the errors of
`recipes.storage.buckets`: FileNotFoundError, ObjectReplaced, StoreUnavailable, StoreRefuses, StoreFull.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class ObjectHead:
    """Metadata of an object: `version` is its ETag, `modified_ms` in ms since 1970."""

    size: int
    version: str
    modified_ms: int


class BucketOperations(Protocol):
    @property
    def reads_in_parallel(self) -> bool:
        """Whether parallel reads of ranges of one object increase throughput."""
        ...

    def put(self, uri: str, key: str, data: bytes) -> None:
        """Store an object atomically."""
        ...

    def put_file(self, uri: str, key: str, path: Path, parts_at_once: int) -> None:
        """Store a file atomically, in parts if it is large."""
        ...

    async def put_stream(self, uri: str, key: str, chunks: AsyncIterator[bytes], size: int | None) -> None:
        """Store a stream atomically.

        An error of `chunks` is raised here and leaves nothing behind.
        """
        ...

    def copy(self, uri: str, key: str, new_uri: str, new_key: str) -> None:
        """Copy an object within the bucket."""
        ...

    def head(self, uri: str, key: str) -> ObjectHead: ...

    def read(self, uri: str, key: str, start: int, stop: int, version: str) -> Iterator[bytes]:
        """Stream the bytes from `start` to `stop` (exclusive).

        If `version` is not empty, only that version is read. The first request is made before this returns, so that a
        missing object is reported here.
        """
        ...

    def prepare_reads(self, uris: Sequence[str]) -> None:
        """Hint that objects will be read soon.

        Where each read needs a signed address, all are requested at once.
        """
        ...

    def entries(self, uri: str, key: str) -> list[tuple[str, int]]:
        """Return key and size of every object below `key`, excluding `key` itself."""
        ...

    def list_folder(self, uri: str, key: str) -> tuple[list[tuple[str, int]], list[str]]:
        """Return the objects directly below `key` with sizes, and the names of folders."""
        ...

    def remove(self, uri: str, key: str) -> None:
        """Delete an object if it exists."""
        ...

    def signed_url(self, uri: str, key: str, seconds: int) -> str | None:
        """Return a URL that reads the object without credentials, or None if unsupported."""
        ...

    def require_mounted(self, uri: str) -> None:
        """Check that a bucket in a folder is still mounted. Raises StoreUnavailable."""
        ...
