"""How much memory the batches of an Arrow file become, told before they are read: 8 KB that are unpacked as one batch became
256 MB.

Where buffers are packed, each begins with the size that it has unpacked, by which the reader takes memory. Which buffers
there are say the messages, in FlatBuffers as Arrow's `Message.fbs` and `File.fbs` have them.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import SEEK_END
from typing import Any, BinaryIO

IPC_MAGIC = b"ARROW1"
FOOTER = struct.Struct("<i6s")
"""What a file ends with: the length of the footer before it, and the same word as at its beginning."""
BLOCK = struct.Struct("<qi4xq")
"""Where a message of a file lies, and how long it and its body are."""
BUFFER = struct.Struct("<qq")
PREFIX = struct.Struct("<i")
SIZE = struct.Struct("<q")
CONTINUATION = -1
"""Stands before the length of a message, since Arrow 0.15."""
UNCOMPRESSED = -1
DICTIONARY, BATCH = 2, 3
LEGACY_COMPRESSION = b"ARROW:experimental_compression"
"""Says in messages of Arrow 0.17 that buffers are packed."""


@dataclass(frozen=True)
class FlatTable:
    """A table of FlatBuffers at a place in its bytes. Raises struct.error where it is none."""

    data: bytes
    at: int

    def value(self, field: int, form: str) -> Any:
        """The value of a field; 0 where it is left out."""
        position = self._place(field)
        return struct.unpack_from(f"<{form}", self.data, position)[0] if position else 0

    def table(self, field: int) -> "FlatTable | None":
        position = self._place(field)
        return FlatTable(self.data, position + self.value(field, "I")) if position else None

    def structs(self, field: int, form: struct.Struct) -> list[tuple[int, ...]]:
        """The elements of a vector."""
        position = self._place(field)
        if not position:
            return []
        start = position + self.value(field, "I") + 4
        (count,) = struct.unpack_from("<I", self.data, start - 4)
        return list(form.iter_unpack(self.data[start : start + count * form.size]))

    def _place(self, field: int) -> int:
        """Where a field is; 0 where it is left out."""
        described = self.at - struct.unpack_from("<i", self.data, self.at)[0]
        (size,) = struct.unpack_from("<H", self.data, described)
        slot = 4 + 2 * field
        (offset,) = struct.unpack_from("<H", self.data, described + slot) if slot < size else (0,)
        return self.at + offset if offset else 0


def root_table(data: bytes) -> FlatTable:
    return FlatTable(data, struct.unpack_from("<I", data, 0)[0])


def uncompressed_size(stream: BinaryIO) -> int:
    """Bytes of all packed buffers of a file or a stream, unpacked. Raises struct.error where it is neither."""
    size = stream.seek(0, SEEK_END)
    stream.seek(0)
    messages = file_messages(stream, size) if stream.read(len(IPC_MAGIC)) == IPC_MAGIC else stream_messages(stream, size)
    return sum(message_uncompressed_size(data, body, stream) for data, body in messages)


def file_messages(stream: BinaryIO, size: int) -> Iterator[tuple[bytes, int]]:
    """Each message that the footer names, and where its body begins."""
    stream.seek(max(size - FOOTER.size, 0))
    length, _ = FOOTER.unpack(stream.read(FOOTER.size))
    stream.seek(max(size - FOOTER.size - length, 0))
    footer = root_table(stream.read(max(length, 0)))
    for offset, before, _ in [*footer.structs(2, BLOCK), *footer.structs(3, BLOCK)]:
        stream.seek(max(offset, 0))
        yield read_message(stream, size)[0], offset + before


def stream_messages(stream: BinaryIO, size: int) -> Iterator[tuple[bytes, int]]:
    """Each message up to the end, and where its body begins."""
    position = 0
    while position < size:
        stream.seek(position)
        data, body = read_message(stream, size)
        if not data:
            return
        yield data, body
        position = body + max(root_table(data).value(3, "q"), 0)


def read_message(stream: BinaryIO, size: int) -> tuple[bytes, int]:
    """The message at the place where a stream is, and where that is then; nothing where the stream ends."""
    (length,) = PREFIX.unpack(stream.read(PREFIX.size))
    if length == CONTINUATION:
        (length,) = PREFIX.unpack(stream.read(PREFIX.size))
    data = stream.read(min(max(length, 0), size))
    return data, stream.tell()


def message_uncompressed_size(data: bytes, body: int, stream: BinaryIO) -> int:
    """Bytes of the packed buffers of one message."""
    message = root_table(data)
    kind, header = message.value(1, "B"), message.table(2)
    batch = header.table(1) if kind == DICTIONARY and header is not None else header if kind == BATCH else None
    if batch is None or (batch.table(3) is None and LEGACY_COMPRESSION not in data):
        return 0
    found = 0
    for offset, length in batch.structs(2, BUFFER):
        if length > SIZE.size:
            stream.seek(max(body + offset, 0))
            (size,) = SIZE.unpack(stream.read(SIZE.size))
            found += length if size == UNCOMPRESSED else max(size, 0)
    return found
