"""Cutting a stream of bytes where its content says so: after an insertion, all chunks but the ones around it are the same.

A chunk ends where a hash over the 32 bytes before is small, so equal regions of two files are cut alike wherever they lie
(content-defined chunking, Muthitacharoen et al. 2001). The hash is four multiplications instead of 32 steps: over 4 bytes
at first, then each time over twice as many, for all positions of a block at once.
"""

from collections.abc import Iterator

import numpy as np

MIN, AVERAGE, MAX = 256 << 10, 1 << 20, 4 << 20
"""Sizes of a chunk in bytes; the last one of a stream may be smaller."""
WINDOW = 32
BLOCK = 128 << 10
"""Positions that are looked at together: what is computed for them stays in the processor's cache."""
OVER_FOUR = np.uint32(0x9E3779B1)
DOUBLINGS = ((1, np.uint32(0x85EBCA77)), (2, np.uint32(0xC2B2AE3D)), (4, np.uint32(0x27D4EB2F)))
"""Distance in 4 bytes, and the odd factor of the earlier half."""
SMALL = np.uint32((1 << 32) // (AVERAGE - MIN))


class Chunker:
    """Cuts what is pushed into chunks. The cuts depend on the bytes alone, and not on the pieces in which they came."""

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._hashes = np.empty((2, BLOCK // 4 + WINDOW), np.uint32)
        self._small = np.empty(BLOCK // 4 + WINDOW, np.bool_)

    def push(self, data: bytes) -> Iterator[bytes]:
        """Take more bytes; the chunks that are complete by now."""
        self._waiting += data
        while len(self._waiting) >= MAX:
            yield self._take()

    def finish(self) -> Iterator[bytes]:
        """The chunks that are left."""
        while self._waiting:
            yield self._take()

    def _take(self) -> bytes:
        end = self._cut()
        chunk = bytes(memoryview(self._waiting)[:end])
        del self._waiting[:end]
        return chunk

    def _cut(self) -> int:
        limit = min(len(self._waiting), MAX)
        for start in range(MIN, limit, BLOCK):
            window = bytes(memoryview(self._waiting)[start - WINDOW : min(start + BLOCK, limit)])
            if (found := self._first_small(window)) is not None:
                return start + found
        return limit

    def _first_small(self, data: bytes) -> int | None:
        """How far behind the first `WINDOW` bytes the first cut lies."""
        found = [place * 4 + offset for offset in range(4) if (place := self._first_of_fourth(data, offset)) is not None]
        return min(found, default=None)

    def _first_of_fourth(self, data: bytes, offset: int) -> int | None:
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
        small = np.less(hashes, SMALL, out=self._small[:count])
        first = int(small.argmax())
        return first if small[first] else None
