"""What every kind of bucket can do: folders and S3 servers (`obstore_bucket`), and objects behind the API (`signed_bucket`).

`uri` is the logical URI that errors name, `key` the object in the bucket. All raise the errors of `recipes.storage.buckets`:
FileNotFoundError, ObjectReplaced, StoreUnavailable, StoreRefuses, StoreFull.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class ObjectHead:
    """What is known of an object without reading it: `version` is its ETag, `modified_ms` in ms since 1970."""

    size: int
    version: str
    modified_ms: int


class BucketOperations(Protocol):
    @property
    def reads_in_parallel(self) -> bool:
        """Whether ranges of one object that are read at the same time come faster."""
        ...

    def put(self, uri: str, key: str, data: bytes) -> None:
        """Store an object whole or not at all."""
        ...

    def put_file(self, uri: str, key: str, path: Path, parts_at_once: int) -> None:
        """Store a file whole or not at all, in parts where it is large."""
        ...

    async def put_stream(self, uri: str, key: str, chunks: AsyncIterator[bytes], size: int | None) -> None:
        """Store what arrives once all of it has; whatever `chunks` raises leaves nothing behind, and is raised here."""
        ...

    def copy(self, uri: str, key: str, new_uri: str, new_key: str) -> None:
        """Copy an object within the bucket."""
        ...

    def head(self, uri: str, key: str) -> ObjectHead: ...

    def read(self, uri: str, key: str, start: int, stop: int, version: str) -> Iterator[bytes]:
        """Stream the bytes from `start` to before `stop`. With a version, of that version only.

        The first request is made before this returns, so that a missing object is known then.
        """
        ...

    def prepare_reads(self, uris: Sequence[str]) -> None:
        """A hint: objects that will be read soon. Where each read needs an address, all are asked for at once."""
        ...

    def entries(self, uri: str, key: str) -> list[tuple[str, int]]:
        """Key and size of every object below `key`; not of one at `key` itself."""
        ...

    def list_folder(self, uri: str, key: str) -> tuple[list[tuple[str, int]], list[str]]:
        """Name and size of the objects directly below `key`, and names of the folders there."""
        ...

    def remove(self, uri: str, key: str) -> None:
        """Delete an object, if it is there."""
        ...

    def signed_url(self, uri: str, key: str, seconds: int) -> str | None:
        """A URL that reads the object without credentials; None where the store has none."""
        ...

    def require_mounted(self, uri: str) -> None:
        """Raises StoreUnavailable: the bucket is a folder that went away."""
        ...
