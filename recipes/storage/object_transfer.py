"""Read objects in ranges with read-ahead, and choose the parts of an upload."""

import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from recipes.storage.bucket_operations import BucketOperations

# Concurrent work with results in the order of its items.

T = TypeVar("T")
R = TypeVar("R")


def prefetch(work: Callable[[T], R], items: Iterable[T], max_in_flight: int) -> Iterator[R]:
    """Yield the results of `work` in order, computed by threads that read ahead.

    At most `max_in_flight` items are in progress or waiting for the consumer.

    Raises the first error in that order; items not started by then are dropped, running ones are waited for.
    """
    with ThreadPoolExecutor(max_in_flight) as threads:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(threads.submit(work, item))
                if len(pending) == max_in_flight:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            threads.shutdown(wait=True, cancel_futures=True)


# Sizes and concurrency of the parts of an upload to S3. Pure functions.

MIN_PART_BYTES = 5 << 20
"""S3's minimum part size; smaller objects are sent in a single request."""
MAX_PARTS = 9_000
"""Below S3's limit of 10,000 parts per object."""
UNKNOWN_SIZE_PART_BYTES = 16 << 20
CONCURRENT_PARTS = 2
"""Parts in flight; times their size, the memory of an upload."""


def choose_part_bytes(size: int | None) -> int:
    """Return the part size for an object of `size` bytes, or of unknown size (None)."""
    return UNKNOWN_SIZE_PART_BYTES if size is None else max(MIN_PART_BYTES, -(-size // MAX_PARTS))


async def chain_chunks(first: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    while first:
        yield first.pop(0)
    async for chunk in rest:
        yield chunk


# Reading one version of an object. Location and upload are in `recipes.storage.object_store`.

READ_CHUNK_BYTES = 1 << 20
RANGE_BYTES = 8 << 20
"""Size of ranges and parts in transfers of whole artifacts."""
PREFETCH_RANGES = 4
"""Number of ranges in flight."""


@dataclass(frozen=True)
class StoredObject:
    """One version of an object.

    Reads fail once it is replaced, so that versions never mix. If `version` is empty, each read returns the version that is
    current then.
    """

    uri: str
    size: int
    version: str
    bucket: BucketOperations
    key: str

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Stream the bytes from `start` to `stop` (exclusive), all of this version.

        Raises:
            FileNotFoundError: the object was removed or replaced.
        """
        stop = self.size if stop is None else min(stop, self.size)
        if start >= stop:
            return iter(())
        return self.bucket.read(self.uri, self.key, start, stop, self.version)

    def prefetch_ranges(self) -> Iterator[bytes]:
        """Stream all bytes in ranges, several of them in flight over separate connections.

        Raises:
            FileNotFoundError: the object was removed or replaced.
        """
        if not self.version or self.size <= RANGE_BYTES or not self.bucket.reads_in_parallel:
            return self.chunks()
        starts = range(0, self.size, RANGE_BYTES)
        return prefetch(lambda start: b"".join(self.chunks(start, start + RANGE_BYTES)), starts, PREFETCH_RANGES)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()
