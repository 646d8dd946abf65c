"""Cutting a stream of bytes where its content says so: after an insertion, all chunks but the ones around it are the same.

A chunk ends where a hash over the 32 bytes before is small, so equal regions of two files are cut alike wherever they lie
(content-defined chunking, Muthitacharoen et al. 2001). The hash is four multiplications instead of 32 steps: over 4 bytes
at first, then each time over twice as many, for all positions of a block at once.
"""

from collections.abc import Iterator

import numpy as np

MIN_CHUNK_BYTES, TARGET_CHUNK_BYTES, MAX_CHUNK_BYTES = 256 << 10, 768 << 10, 4 << 20
"""Sizes of a chunk in bytes, 1 MiB on average. The last one of a stream may be smaller."""
WINDOW_BYTES = 32
BLOCK_POSITIONS = 128 << 10
"""Positions that are looked at together: what is computed for them stays in the processor's cache."""
FIRST_FACTOR = np.uint32(0x9E3779B1)
DOUBLINGS = ((1, np.uint32(0x85EBCA77)), (2, np.uint32(0xC2B2AE3D)), (4, np.uint32(0x27D4EB2F)))
"""Distance in 4 bytes, and the odd factor of the earlier half."""
RARE_THRESHOLD, FREQUENT_THRESHOLD = np.uint32((1 << 32) // (2 << 20)), np.uint32((1 << 32) // (512 << 10))
"""Below which a hash cuts, before and from the usual size on: so that chunks are of similar size, and few at their largest
(normalized chunking, Xia et al. 2016)."""


class Chunker:
    """Cuts what is pushed into chunks. The cuts depend on the bytes alone, and not on the pieces in which they came."""

    def __init__(self) -> None:
        self._buffer = bytearray()  # which grows to `2 * MAX`: of a hundred thousand small files each would clear as much
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._hashes = np.empty((2, BLOCK_POSITIONS // 4 + WINDOW_BYTES), np.uint32)
        self._small = np.empty(BLOCK_POSITIONS // 4 + WINDOW_BYTES, np.bool_)

    def push(self, data: bytes) -> Iterator[bytes]:
        """Take more bytes; the chunks that are complete by now."""
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
        """The chunks that are left."""
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
        """How long the next chunk is."""
        limit = min(self._end - self._start, MAX_CHUNK_BYTES)
        for start in range(MIN_CHUNK_BYTES, limit, BLOCK_POSITIONS):
            window = self._view[self._start + start - WINDOW_BYTES : self._start + min(start + BLOCK_POSITIONS, limit)]
            if (
                found := self._find_cut(window, RARE_THRESHOLD if start < TARGET_CHUNK_BYTES else FREQUENT_THRESHOLD)
            ) is not None:
                return start + found
        return limit

    def _find_cut(self, data: memoryview, bound: np.uint32) -> int | None:
        """How far behind the first `WINDOW_BYTES` bytes the first cut lies."""
        found = [
            place * 4 + offset for offset in range(4) if (place := self._find_cut_at_offset(data, offset, bound)) is not None
        ]
        return min(found, default=None)

    def _find_cut_at_offset(self, data: memoryview, offset: int, bound: np.uint32) -> int | None:
        """The first window with a small hash among those that begin at every fourth byte."""
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
