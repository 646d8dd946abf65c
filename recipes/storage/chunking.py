"""Content-defined chunking: after an insertion only the chunks around it change.

A chunk ends where a hash over the preceding 32 bytes is small, so that equal regions of two files are cut alike wherever
they are (Muthitacharoen et al. 2001). The hash is computed with four multiplications instead of 32 steps: over 4 bytes
first, then over twice as many each time, for all positions of a block at once.
"""

from collections.abc import Iterator

import numpy as np

MIN_CHUNK_BYTES, TARGET_CHUNK_BYTES, MAX_CHUNK_BYTES = 256 << 10, 768 << 10, 4 << 20
"""Chunk sizes in bytes, 1 MiB on average. The last chunk of a stream may be smaller."""
WINDOW_BYTES = 32
BLOCK_POSITIONS = 128 << 10
"""Positions hashed together: small enough for the CPU's cache."""
FIRST_FACTOR = np.uint32(0x9E3779B1)
DOUBLINGS = ((1, np.uint32(0x85EBCA77)), (2, np.uint32(0xC2B2AE3D)), (4, np.uint32(0x27D4EB2F)))
"""Distance in units of 4 bytes, and the odd factor for the earlier half."""
RARE_THRESHOLD, FREQUENT_THRESHOLD = np.uint32((1 << 32) // (2 << 20)), np.uint32((1 << 32) // (512 << 10))
"""Thresholds below which a hash cuts, before and after the target size: chunks get similar sizes, and few reach the maximum
(normalized chunking, Xia et al. 2016)."""


class Chunker:
    """Splits a stream into chunks.

    Cuts depend on the bytes alone, not on how they were pushed.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()  # grows up to `2 * MAX`: allocating that at once would dominate for many small files
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._hashes = np.empty((2, BLOCK_POSITIONS // 4 + WINDOW_BYTES), np.uint32)
        self._small = np.empty(BLOCK_POSITIONS // 4 + WINDOW_BYTES, np.bool_)

    def push(self, data: bytes) -> Iterator[bytes]:
        """Add bytes and yield the chunks that are complete."""
        rest = memoryview(data)
        while rest:
            if self._end == len(self._buffer):
                self._grow_buffer(len(rest))
            copied = min(len(rest), len(self._buffer) - self._end)
            self._view[self._end : self._end + copied] = rest[:copied]
            self._end += copied
            rest = rest[copied:]
            while self._end - self._start >= MAX_CHUNK_BYTES:
                yield self._pop_chunk()

    def finish(self) -> Iterator[bytes]:
        """Yield the remaining chunks."""
        while self._start < self._end:
            yield self._pop_chunk()

    def _grow_buffer(self, needed: int) -> None:
        remaining = bytes(self._view[self._start : self._end])
        if len(self._buffer) < 2 * MAX_CHUNK_BYTES:
            self._buffer = bytearray(min(max(len(remaining) + needed, 2 * len(self._buffer)), 2 * MAX_CHUNK_BYTES))
            self._view = memoryview(self._buffer)
        self._view[: len(remaining)] = remaining
        self._start, self._end = 0, len(remaining)

    def _pop_chunk(self) -> bytes:
        begin = self._start
        self._start += self._find_chunk_length()
        return bytes(self._view[begin : self._start])

    def _find_chunk_length(self) -> int:
        """Return the length of the next chunk."""
        limit = min(self._end - self._start, MAX_CHUNK_BYTES)
        for start in range(MIN_CHUNK_BYTES, limit, BLOCK_POSITIONS):
            window = self._view[self._start + start - WINDOW_BYTES : self._start + min(start + BLOCK_POSITIONS, limit)]
            if (
                found := self._find_cut(window, RARE_THRESHOLD if start < TARGET_CHUNK_BYTES else FREQUENT_THRESHOLD)
            ) is not None:
                return start + found
        return limit

    def _find_cut(self, data: memoryview, bound: np.uint32) -> int | None:
        """Return the distance of the first cut after the first `WINDOW_BYTES` bytes, or None."""
        found = [
            place * 4 + offset for offset in range(4) if (place := self._find_cut_at_offset(data, offset, bound)) is not None
        ]
        return min(found, default=None)

    def _find_cut_at_offset(self, data: memoryview, offset: int, bound: np.uint32) -> int | None:
        """Return the first window with a small hash, of those at every fourth byte."""
        count = (len(data) - offset) // 4
        if count < WINDOW_BYTES // 4:
            return None
        values, spare = self._hashes
        hashes = np.multiply(np.frombuffer(data, "<u4", count, offset), FIRST_FACTOR, out=values[:count])
        for distance, factor in DOUBLINGS:
            count -= distance
            doubled = np.multiply(hashes[:-distance], factor, out=spare[:count])
            doubled += hashes[distance:]
            hashes, values, spare = doubled, spare, values
        small = np.less(hashes, bound, out=self._small[:count])
        first = int(small.argmax())
        return first if small[first] else None
