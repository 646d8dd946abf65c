"""Read objects in ranges with prefetch, and choose the parts of an upload."""

import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from recipes.storage.bucket_operations import BucketOperations

# Several things that are done at the same time, and come in the order in which they were asked for.

T = TypeVar("T")
R = TypeVar("R")


def prefetch(work: Callable[[T], R], items: Iterable[T], max_in_flight: int) -> Iterator[R]:
    """The results of `work`, by threads that are never further ahead of whoever takes them than `max_in_flight`.

    Raises the first error in that order; what has not begun by then never does, and what has is waited for.
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


# In which parts an object goes to an S3 server: how large they are, and how many are on their way at once. Pure.

MIN_PART_BYTES = 5 << 20
"""The smallest part that S3 takes, and what is sent in one request without parts."""
MAX_PARTS = 9_000
"""S3 takes 10,000 parts of an object."""
UNKNOWN_SIZE_PART_BYTES = 16 << 20
CONCURRENT_PARTS = 2
"""Parts on their way at once: together with their size, the memory of an upload."""


def choose_part_bytes(size: int | None) -> int:
    """Of an object of so many bytes, or of one of which nobody knows how many will come."""
    return UNKNOWN_SIZE_PART_BYTES if size is None else max(MIN_PART_BYTES, -(-size // MAX_PARTS))


async def chain_chunks(first: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    while first:
        yield first.pop(0)
    async for chunk in rest:
        yield chunk


# One version of an object, read in chunks.
#
# What belongs here: reading. What does not: where it lies and how it came there (`recipes.storage.object_store`).

READ_CHUNK_BYTES = 1 << 20
RANGE_BYTES = 8 << 20
"""Of what is not read or sent in one piece, by a program that moves whole artifacts."""
PREFETCH_RANGES = 4
"""That are on their way at once."""


@dataclass(frozen=True)
class StoredObject:
    """One version of an object: as soon as another takes its place, reading it fails instead of mixing the two.

    Where `version` is empty it is whichever lies there, and only what one read gives is of one.
    """

    uri: str
    size: int
    version: str
    bucket: BucketOperations
    key: str

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes, or those from `start` to before `stop`: all of this version, once this has returned.

        Raises:
            FileNotFoundError: the object is gone, or is another one.
        """
        stop = self.size if stop is None else min(stop, self.size)
        if start >= stop:
            return iter(())
        return self.bucket.read(self.uri, self.key, start, stop, self.version)

    def prefetch_ranges(self) -> Iterator[bytes]:
        """All of it, in parts of which some are fetched at the same time, each over a connection of its own.

        Raises:
            FileNotFoundError: the object is gone, or is another one.
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
