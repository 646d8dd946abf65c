"""Cutting a stream of bytes where its content says so: after an insertion, all chunks but the ones around it are the same.

A chunk ends where a hash over the 32 bytes before is small, so equal regions of two files are cut alike wherever they lie
(content-defined chunking, Muthitacharoen et al. 2001). The hash is four multiplications instead of 32 steps: over 4 bytes
at first, then each time over twice as many, for all positions of a block at once.
"""

from collections.abc import Iterator

import numpy as np

MIN, USUAL, MAX = 256 << 10, 768 << 10, 4 << 20
"""Sizes of a chunk in bytes, 1 MiB on average. The last one of a stream may be smaller."""
WINDOW = 32
BLOCK = 128 << 10
"""Positions that are looked at together: what is computed for them stays in the processor's cache."""
OVER_FOUR = np.uint32(0x9E3779B1)
DOUBLINGS = ((1, np.uint32(0x85EBCA77)), (2, np.uint32(0xC2B2AE3D)), (4, np.uint32(0x27D4EB2F)))
"""Distance in 4 bytes, and the odd factor of the earlier half."""
RARE, OFTEN = np.uint32((1 << 32) // (2 << 20)), np.uint32((1 << 32) // (512 << 10))
"""Below which a hash cuts, before and from the usual size on: so that chunks are of similar size, and few at their largest
(normalized chunking, Xia et al. 2016)."""


class Chunker:
    """Cuts what is pushed into chunks. The cuts depend on the bytes alone, and not on the pieces in which they came."""

    def __init__(self) -> None:
        self._buffer = bytearray()  # which grows to `2 * MAX`: of a hundred thousand small files each would clear as much
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._hashes = np.empty((2, BLOCK // 4 + WINDOW), np.uint32)
        self._small = np.empty(BLOCK // 4 + WINDOW, np.bool_)

    def push(self, data: bytes) -> Iterator[bytes]:
        """Take more bytes; the chunks that are complete by now."""
        rest = memoryview(data)
        while rest:
            if self._end == len(self._buffer):
                self._make_room(len(rest))
            taken = min(len(rest), len(self._buffer) - self._end)
            self._view[self._end : self._end + taken] = rest[:taken]
            self._end += taken
            rest = rest[taken:]
            while self._end - self._start >= MAX:
                yield self._take()

    def finish(self) -> Iterator[bytes]:
        """The chunks that are left."""
        while self._start < self._end:
            yield self._take()

    def _make_room(self, wanted: int) -> None:
        left = bytes(self._view[self._start : self._end])
        if len(self._buffer) < 2 * MAX:
            self._buffer = bytearray(min(max(len(left) + wanted, 2 * len(self._buffer)), 2 * MAX))
            self._view = memoryview(self._buffer)
        self._view[: len(left)] = left
        self._start, self._end = 0, len(left)

    def _take(self) -> bytes:
        begin = self._start
        self._start += self._cut()
        return bytes(self._view[begin : self._start])

    def _cut(self) -> int:
        """How long the next chunk is."""
        limit = min(self._end - self._start, MAX)
        for start in range(MIN, limit, BLOCK):
            window = self._view[self._start + start - WINDOW : self._start + min(start + BLOCK, limit)]
            if (found := self._first_small(window, RARE if start < USUAL else OFTEN)) is not None:
                return start + found
        return limit

    def _first_small(self, data: memoryview, bound: np.uint32) -> int | None:
        """How far behind the first `WINDOW` bytes the first cut lies."""
        found = [
            place * 4 + offset for offset in range(4) if (place := self._first_of_fourth(data, offset, bound)) is not None
        ]
        return min(found, default=None)

    def _first_of_fourth(self, data: memoryview, offset: int, bound: np.uint32) -> int | None:
        """The first window with a small hash among those that begin at every fourth byte."""
        count = (len(data) - offset) // 4
        if count < WINDOW // 4:
            return None
        values, spare = self._hashes
        hashes = np.multiply(np.frombuffer(data, "<u4", count, offset), OVER_FOUR, out=values[:count])
        for distance, factor in DOUBLINGS:
            count -= distance
            doubled = np.multiply(hashes[:-distance], factor, out=spare[:count])
            doubled += hashes[distance:]
            hashes, values, spare = doubled, spare, values
        small = np.less(hashes, bound, out=self._small[:count])
        first = int(small.argmax())
        return first if small[first] else None
