"""Raw file streams: store the bytes that are read, decompress them, refuse damaged files."""

import io
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from resources.ingest.decompression_bomb import EXPANSION_MESSAGE, exceeds_expansion_limit
from resources.ingest.magic_bytes import GZIP, MAX_MAGIC_BYTES, ZSTD, detect_other_encoding, detect_other_format

BLOCK_BYTES = 1 << 20
UNSUPPORTED_COMPRESSIONS = {b"PK\x03\x04": "zip", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}
"""First bytes of compressed formats that are not supported."""
BZIP2_BLOCK = b"1AY&SY"
"""Follows the first bytes of bzip2, which could also begin a text."""


class DamagedFile(Exception):
    """A file cannot be read to its end.

    The message completes a sentence that begins with the file's name.
    """


class TeeStream(io.RawIOBase):
    """Passes each byte of a stream to `keep` once, when it is first read.

    `size` is their number.
    """

    def __init__(self, stream: BinaryIO, keep: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._keep = keep
        self._all_kept = False
        self.size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._keep(data)
        self.size += len(data)
        buffer[: len(data)] = data
        return len(data)

    def is_empty(self) -> bool:
        """Return whether the file has no bytes. Call it before anything is read."""
        is_empty = not self._stream.read(1)
        self._stream.seek(0)
        return is_empty

    def drain(self) -> None:
        """Pass on everything that has not been read yet."""
        while not self._all_kept and (data := self._stream.read(BLOCK_BYTES)):
            self._keep(data)
            self.size += len(data)
        self._all_kept = True

    def reopen(self) -> BinaryIO:
        """Pass on all of the file, then return it as a seekable stream."""
        self.drain()
        self._stream.seek(0)
        return cast(BinaryIO, io.BufferedReader(UnclosedStream(self._stream), BLOCK_BYTES))


class UnclosedStream(io.RawIOBase):
    """A stream for readers that close what they read; the underlying stream stays open."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class CountingStream(io.RawIOBase):
    """A stream that counts the bytes read from it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.size = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        self.size += len(data)
        return data


class DecompressedStream(io.RawIOBase):
    """The decompressed contents of a stream. `size` is the number of bytes so far."""

    def __init__(self, packed: BinaryIO, compression: str) -> None:
        import pyarrow as pa  # slow to import, and most files are not compressed

        self._compression = compression
        self._packed = CountingStream(packed)
        self._stream = pa.CompressedInputStream(pa.PythonFile(self._packed, mode="r"), compression)
        self.size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            size = cast(int, self._stream.readinto(buffer))
        except OSError as error:
            raise DamagedFile(f"is not a complete {self._compression} file ({error})") from None
        self.size += size
        if exceeds_expansion_limit(self.size, self._packed.size):
            raise DamagedFile(EXPANSION_MESSAGE)
        return size


def bytes_read(stream: "io.BufferedReader[io.RawIOBase]") -> int:
    """Return how many bytes were read from a file, after decompression."""
    return cast(TeeStream | DecompressedStream, stream.raw).size


def decompress(stream: io.RawIOBase | BinaryIO) -> "io.BufferedReader[io.RawIOBase]":
    """Return the stream, decompressed if it is compressed; the file's name does not matter.

    Raises:
        DamagedFile: the compression is not supported, or the contents are not lines in UTF-8.
    """
    buffered: io.BufferedReader[io.RawIOBase] = io.BufferedReader(cast(io.RawIOBase, stream), BLOCK_BYTES)
    beginning = buffered.peek(MAX_MAGIC_BYTES)
    archive = next((name for start, name in UNSUPPORTED_COMPRESSIONS.items() if beginning.startswith(start)), None)
    if archive is not None and (archive != "bzip2" or beginning[4:].startswith(BZIP2_BLOCK)):
        raise DamagedFile(f"is a {archive} file, and only gzip and zstd are supported: unpack it first")
    if words := detect_other_format(beginning) or detect_other_encoding(beginning):
        raise DamagedFile(words)
    compression = "gzip" if beginning.startswith(GZIP) else "zstd" if beginning.startswith(ZSTD) else None
    if compression is None:
        return buffered
    return io.BufferedReader(DecompressedStream(buffered, compression), BLOCK_BYTES)
