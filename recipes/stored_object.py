"""One version of an object, read in chunks.

What belongs here: reading. What does not: where it lies and how it came there (`recipes.objects`).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import obstore

from recipes.buckets import Bucket, readable_errors

CHUNK = 1 << 20


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

    def _streamed(self, found: "obstore.GetResult") -> Iterator[bytes]:
        with readable_errors(self.uri, self.bucket):
            for chunk in found.stream(min_chunk_size=CHUNK):
                yield bytes(chunk)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()
