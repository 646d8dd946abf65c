"""A raw file while it is read: what goes by is stored, what is compressed is unpacked."""

import io
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from resources.ingest.decompression_bomb import WORDS, is_swollen
from resources.ingest.magic_bytes import GZIP, LONGEST_BEGINNING, ZSTD, another_encoding, another_format

BLOCK = 1 << 20
UNREAD = {b"PK\x03\x04": "zip", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}
"""How those begin that nobody unpacks here."""
BLOCK_OF_BZIP2 = b"1AY&SY"
"""What stands behind the beginning of bzip2, which a text could have."""


class Damaged(Exception):
    """A file cannot be read to its end: the message says why, as what follows its name."""


class Recorded(io.RawIOBase):
    """Gives every byte of a stream to `keep`, once, on its way to whoever reads it first. `size` is how many there were."""

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

    def to_the_end(self) -> None:
        """Keep what nobody has read yet."""
        while not self._all_kept and (data := self._stream.read(BLOCK)):
            self._keep(data)
            self.size += len(data)
        self._all_kept = True

    def again(self) -> BinaryIO:
        """The whole file to be read from any position, all of it kept already."""
        self.to_the_end()
        self._stream.seek(0)
        return cast(BinaryIO, io.BufferedReader(Borrowed(self._stream), BLOCK))


class Borrowed(io.RawIOBase):
    """A stream for readers that close what they read; it stays open."""

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


class Counted(io.RawIOBase):
    """A stream that knows how many bytes were read of it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.size = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        self.size += len(data)
        return data


class Unpacked(io.RawIOBase):
    """A compressed stream as what is in it. `size` is how many bytes that was until now."""

    def __init__(self, packed: BinaryIO, compression: str) -> None:
        import pyarrow as pa  # slow to import, and most files are not compressed

        self._compression = compression
        self._packed = Counted(packed)
        self._stream = pa.CompressedInputStream(pa.PythonFile(self._packed, mode="r"), compression)
        self.size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            size = cast(int, self._stream.readinto(buffer))
        except OSError as error:
            raise Damaged(f"is no whole {self._compression} file ({error})") from None
        self.size += size
        if is_swollen(self.size, self._packed.size):
            raise Damaged(WORDS)
        return size


def bytes_of(stream: "io.BufferedReader[io.RawIOBase]") -> int:
    """How many bytes were read of a file, unpacked where it is compressed."""
    return cast(Recorded | Unpacked, stream.raw).size


def unpacked(stream: io.RawIOBase | BinaryIO) -> "io.BufferedReader[io.RawIOBase]":
    """The stream itself, or what is in it where it is compressed, whatever the file is called.

    Raises:
        Damaged: it is compressed as nobody unpacks it here, or no file of lines in UTF-8.
    """
    buffered: io.BufferedReader[io.RawIOBase] = io.BufferedReader(cast(io.RawIOBase, stream), BLOCK)
    beginning = buffered.peek(LONGEST_BEGINNING)
    archive = next((name for start, name in UNREAD.items() if beginning.startswith(start)), None)
    if archive is not None and (archive != "bzip2" or beginning[4:].startswith(BLOCK_OF_BZIP2)):
        raise Damaged(f"is a {archive} file, and only gzip and zstd are unpacked here: unpack it before")
    if words := another_format(beginning) or another_encoding(beginning):
        raise Damaged(words)
    compression = "gzip" if beginning.startswith(GZIP) else "zstd" if beginning.startswith(ZSTD) else None
    if compression is None:
        return buffered
    return io.BufferedReader(Unpacked(buffered, compression), BLOCK)
