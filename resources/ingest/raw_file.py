"""Raw file streams: detect format, decompress, refuse decompression bombs."""

import io
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, cast

# What a file is by how it begins, for whoever said that it is something else.

FORMAT_MAGIC: Mapping[bytes, str] = {b"PAR1\x15": "parquet", b"ARROW1\0\0": "arrow"}
"""No text begins so: what comes behind the word has no letter."""
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""How compressed files begin. No text in UTF-8 does."""
COMPRESSION_MAGIC: Mapping[bytes, str] = {GZIP: "gzip", ZSTD: "zstd"}
"""Only files of lines are unpacked: of the others some is read from their end."""
ENCODING_MAGIC: Mapping[bytes, str] = {b"\xff\xfe\0\0": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
MAX_MAGIC_BYTES = 10


def detect_other_format(beginning: bytes, declared: str = "") -> str | None:
    """That a file is of another format than `declared`, as what follows its name; None where its beginning does not tell."""
    packed = next((name for start, name in COMPRESSION_MAGIC.items() if beginning.startswith(start)), None)
    if packed and declared:
        return f"is packed with {packed}: unpack it before, as a {declared} file can be compressed within"
    format = next((name for start, name in FORMAT_MAGIC.items() if beginning.startswith(start)), declared)
    return None if format == declared else f"is a {format} file: give its format as {format}"


def detect_other_encoding(beginning: bytes) -> str | None:
    """That a file of lines is not in UTF-8, as what follows its name; None where its beginning does not tell."""
    name = next((name for start, name in ENCODING_MAGIC.items() if beginning.startswith(start)), None)
    if name is None:
        return None
    return f"is written in {name}, and only UTF-8 is read: write it so, as `iconv -f {name} -t UTF-8 FILE` does"


# Files that are far larger unpacked than they are: some KB of those would keep the server busy, and fill its store.

ALWAYS_ALLOWED_BYTES = 1 << 30
"""Bytes that anybody may unpack, however few they were."""
MAX_EXPANSION_FACTOR = 200
"""More than real data shrinks to: text to a tenth, logs that repeat themselves to a fiftieth."""
EXPANSION_MESSAGE = (
    f"unpacks to more than {MAX_EXPANSION_FACTOR} times its size: if it is data all the same, unpack it and send it as it is"
)

COLUMN_NAMES_MESSAGE = (
    f"has names of columns that make its records more than {MAX_EXPANSION_FACTOR} times as large as it is: shorten them"
)


def exceeds_expansion_limit(unpacked: int, packed: int) -> bool:
    return unpacked > max(ALWAYS_ALLOWED_BYTES, MAX_EXPANSION_FACTOR * packed)


# A raw file while it is read: what goes by is stored, what is compressed is unpacked.

BLOCK_BYTES = 1 << 20
UNSUPPORTED_COMPRESSIONS = {b"PK\x03\x04": "zip", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}
"""How those begin that nobody unpacks here."""
BZIP2_BLOCK = b"1AY&SY"
"""What stands behind the beginning of bzip2, which a text could have."""


class DamagedFile(Exception):
    """A file cannot be read to its end: the message says why, as what follows its name."""


class TeeStream(io.RawIOBase):
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

    def drain(self) -> None:
        """Keep what nobody has read yet."""
        while not self._all_kept and (data := self._stream.read(BLOCK_BYTES)):
            self._keep(data)
            self.size += len(data)
        self._all_kept = True

    def reopen(self) -> BinaryIO:
        """The whole file to be read from any position, all of it kept already."""
        self.drain()
        self._stream.seek(0)
        return cast(BinaryIO, io.BufferedReader(UnclosedStream(self._stream), BLOCK_BYTES))


class UnclosedStream(io.RawIOBase):
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


class CountingStream(io.RawIOBase):
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


class DecompressedStream(io.RawIOBase):
    """A compressed stream as what is in it. `size` is how many bytes that was until now."""

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
            raise DamagedFile(f"is no whole {self._compression} file ({error})") from None
        self.size += size
        if exceeds_expansion_limit(self.size, self._packed.size):
            raise DamagedFile(EXPANSION_MESSAGE)
        return size


def bytes_read(stream: "io.BufferedReader[io.RawIOBase]") -> int:
    """How many bytes were read of a file, unpacked where it is compressed."""
    return cast(TeeStream | DecompressedStream, stream.raw).size


def decompress(stream: io.RawIOBase | BinaryIO) -> "io.BufferedReader[io.RawIOBase]":
    """The stream itself, or what is in it where it is compressed, whatever the file is called.

    Raises:
        DamagedFile: it is compressed as nobody unpacks it here, or no file of lines in UTF-8.
    """
    buffered: io.BufferedReader[io.RawIOBase] = io.BufferedReader(cast(io.RawIOBase, stream), BLOCK_BYTES)
    beginning = buffered.peek(MAX_MAGIC_BYTES)
    archive = next((name for start, name in UNSUPPORTED_COMPRESSIONS.items() if beginning.startswith(start)), None)
    if archive is not None and (archive != "bzip2" or beginning[4:].startswith(BZIP2_BLOCK)):
        raise DamagedFile(f"is a {archive} file, and only gzip and zstd are unpacked here: unpack it before")
    if words := detect_other_format(beginning) or detect_other_encoding(beginning):
        raise DamagedFile(words)
    compression = "gzip" if beginning.startswith(GZIP) else "zstd" if beginning.startswith(ZSTD) else None
    if compression is None:
        return buffered
    return io.BufferedReader(DecompressedStream(buffered, compression), BLOCK_BYTES)
