"""One version of an object, read in chunks.

What belongs here: reading. What does not: where it lies and how it came there (`recipes.storage.object_store`).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import obstore
from obstore.store import LocalStore

from recipes.storage.buckets import Bucket, readable_errors
from recipes.storage.prefetch import ahead

CHUNK = 1 << 20
AHEAD_PART = 8 << 20
"""Of what is not read or sent in one piece, by a program that moves whole artifacts."""
PARTS_AHEAD = 4
"""That are on their way at once."""


@dataclass(frozen=True)
class StoredObject:
    """One version of an object: as soon as another takes its place, reading it fails instead of mixing the two.

    Where `version` is empty it is whichever lies there, and only what one read gives is of one.
    """

    uri: str
    size: int
    version: str
    bucket: Bucket
    key: str

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes, or those from `start` to before `stop`: all of this version, once this has returned.

        Raises:
            FileNotFoundError: the object is gone, or is another one.
        """
        stop = self.size if stop is None else min(stop, self.size)
        if start >= stop:
            return iter(())
        options: dict[str, Any] = {"range": (start, stop)}
        if self.version:
            options["if_match"] = self.version
        with readable_errors(self.uri, self.bucket):
            found = obstore.get(self.bucket, self.key, options=options)
        return self._streamed(found)

    def parts_ahead(self) -> Iterator[bytes]:
        """All of it, in parts of which some are fetched at the same time, each over a connection of its own.

        Raises:
            FileNotFoundError: the object is gone, or is another one.
        """
        if not self.version or self.size <= AHEAD_PART or isinstance(self.bucket, LocalStore):
            return self.chunks()
        starts = range(0, self.size, AHEAD_PART)
        return ahead(lambda start: b"".join(self.chunks(start, start + AHEAD_PART)), starts, PARTS_AHEAD)

    def _streamed(self, found: "obstore.GetResult") -> Iterator[bytes]:
        with readable_errors(self.uri, self.bucket):
            for chunk in found.stream(min_chunk_size=CHUNK):
                yield bytes(chunk)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()
