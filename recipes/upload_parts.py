"""In which parts an object goes to an S3 server: how large they are, and how many are on their way at once. Pure."""

from collections.abc import AsyncIterator

PART = 5 << 20
"""The smallest part that S3 takes, and what is sent in one request without parts."""
PARTS = 9_000
"""S3 takes 10,000 parts of an object."""
PART_OF_UNKNOWN = 16 << 20
CONCURRENT_PARTS = 2
"""Parts on their way at once: together with their size, the memory of an upload."""


def part_size(size: int | None) -> int:
    """Of an object of so many bytes, or of one of which nobody knows how many will come."""
    return PART_OF_UNKNOWN if size is None else max(PART, -(-size // PARTS))


async def rejoined(first: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    while first:
        yield first.pop(0)
    async for chunk in rest:
        yield chunk
