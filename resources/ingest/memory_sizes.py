"""Estimate the uncompressed memory size of Parquet and Arrow files before reading them."""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import SEEK_END
from typing import Any, BinaryIO

# The memory size of an Arrow file's batches, determined before they are read: 8 KB that were decompressed as one batch
# became 256 MB.
#
# Each compressed buffer begins with its decompressed size, which the reader allocates. The messages list the buffers, as
# FlatBuffers defined in Arrow's `Message.fbs` and `File.fbs`.

IPC_MAGIC = b"ARROW1"
FOOTER = struct.Struct("<i6s")
"""The end of a file: the length of the footer before it, and the magic bytes from its beginning."""
BLOCK = struct.Struct("<qi4xq")
"""The position of a message in a file, and the lengths of the message and of its body."""
BUFFER = struct.Struct("<qq")
PREFIX = struct.Struct("<i")
SIZE = struct.Struct("<q")
CONTINUATION = -1
"""Precedes the length of a message, since Arrow 0.15."""
UNCOMPRESSED = -1
DICTIONARY, BATCH = 2, 3
LEGACY_COMPRESSION = b"ARROW:experimental_compression"
"""Marks messages of Arrow 0.17 with compressed buffers."""


@dataclass(frozen=True)
class FlatTable:
    """A FlatBuffers table at a position in its data. Raises struct.error if there is none."""

    data: bytes
    at: int

    def value(self, field: int, form: str) -> Any:
        """Return the value of a field; 0 if it is absent."""
        position = self._place(field)
        return struct.unpack_from(f"<{form}", self.data, position)[0] if position else 0

    def table(self, field: int) -> "FlatTable | None":
        position = self._place(field)
        return FlatTable(self.data, position + self.value(field, "I")) if position else None

    def structs(self, field: int, form: struct.Struct) -> list[tuple[int, ...]]:
        """Return the elements of a vector."""
        position = self._place(field)
        if not position:
            return []
        start = position + self.value(field, "I") + 4
        (count,) = struct.unpack_from("<I", self.data, start - 4)
        return list(form.iter_unpack(self.data[start : start + count * form.size]))

    def _place(self, field: int) -> int:
        """Return the position of a field; 0 if it is absent."""
        described = self.at - struct.unpack_from("<i", self.data, self.at)[0]
        (size,) = struct.unpack_from("<H", self.data, described)
        slot = 4 + 2 * field
        (offset,) = struct.unpack_from("<H", self.data, described + slot) if slot < size else (0,)
        return self.at + offset if offset else 0


def root_table(data: bytes) -> FlatTable:
    return FlatTable(data, struct.unpack_from("<I", data, 0)[0])


def uncompressed_size(stream: BinaryIO) -> int:
    """Return the decompressed bytes of all compressed buffers. Raises struct.error: the data is not Arrow."""
    size = stream.seek(0, SEEK_END)
    stream.seek(0)
    messages = file_messages(stream, size) if stream.read(len(IPC_MAGIC)) == IPC_MAGIC else stream_messages(stream, size)
    return sum(message_uncompressed_size(data, body, stream) for data, body in messages)


def file_messages(stream: BinaryIO, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield each message in the footer, and the position of its body."""
    stream.seek(max(size - FOOTER.size, 0))
    length, _ = FOOTER.unpack(stream.read(FOOTER.size))
    stream.seek(max(size - FOOTER.size - length, 0))
    footer = root_table(stream.read(max(length, 0)))
    for offset, before, _ in [*footer.structs(2, BLOCK), *footer.structs(3, BLOCK)]:
        stream.seek(max(offset, 0))
        yield read_message(stream, size)[0], offset + before


def stream_messages(stream: BinaryIO, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield each message up to the end, and the position of its body."""
    position = 0
    while position < size:
        stream.seek(position)
        data, body = read_message(stream, size)
        if not data:
            return
        yield data, body
        position = body + max(root_table(data).value(3, "q"), 0)


def read_message(stream: BinaryIO, size: int) -> tuple[bytes, int]:
    """Read the message at the current position; also return the position after it.

    Empty at the end of the stream.
    """
    (length,) = PREFIX.unpack(stream.read(PREFIX.size))
    if length == CONTINUATION:
        (length,) = PREFIX.unpack(stream.read(PREFIX.size))
    data = stream.read(min(max(length, 0), size))
    return data, stream.tell()


def message_uncompressed_size(data: bytes, body: int, stream: BinaryIO) -> int:
    """Return the decompressed bytes of the compressed buffers of one message."""
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


# The memory size of a Parquet file's pages, determined before they are read: 762 bytes, with a text of 10 MiB in a
# dictionary to which 512 rows refer, became 6 GB.

MAX_HELD_BYTES = 512 << 20
"""Approximate limit for the bytes of repeated texts that are in memory at once."""
MAX_INSPECTED_BYTES = 4 << 20
"""Maximum size of a dictionary whose texts are examined one by one; writers limit theirs to one MiB."""
TEXT_TYPE, FIXED_LENGTH_TYPE = "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"
HEADER_BYTES = 64
DICTIONARY_PAGE = 2
DICTIONARY_FIELD = {3: b"\x4c", 4: b"\x3c"}
"""First byte of a page header's dictionary field, after three or four numbers."""
SORTED_FIELD = (b"\x11", b"\x12")
LENGTH = struct.Struct("<I")
CODECS: Mapping[str, str | None] = {
    "UNCOMPRESSED": None,
    "SNAPPY": "snappy",
    "GZIP": "gzip",
    "BROTLI": "brotli",
    "ZSTD": "zstd",
}
"""Compressions that have only one format: LZ4 has two."""
SHARED_ENCODINGS = frozenset({"RLE_DICTIONARY", "PLAIN_DICTIONARY", "DELTA_BYTE_ARRAY"})
"""Encodings in which values share bytes."""


def group_columns(group: Any) -> list[Any]:
    """Return the metadata of each column of a row group."""
    return [group.column(index) for index in range(group.num_columns)]


def min_group_size(group: Any) -> int:
    """Return the minimum memory size of a row group in bytes.

    This is the size of all its pages, and at least one byte for each value: a page may encode a billion repetitions of a
    value.
    """
    return sum(max(column.total_uncompressed_size, column.num_values) for column in group_columns(group))


def max_batch_rows(group: Any, stream: BinaryIO, wanted: int) -> int:
    """Return how many rows of a row group, up to `wanted`, surely fit in memory.

    They fit even if all their texts have the maximum length.

    Dictionaries are read only if their sizes alone do not decide this: otherwise a hundred columns of short texts would be
    read only a few rows at a time.
    """
    texts = [column for column in group_columns(group) if column.physical_type in (TEXT_TYPE, FIXED_LENGTH_TYPE)]
    fitting = wanted
    for max_length in (max_shared_value_bytes, max_dictionary_value_bytes):
        row_bytes = sum(max_length(column, stream) * max(1, column.num_values // max(group.num_rows, 1)) for column in texts)
        fitting = int(max(1, min(wanted, MAX_HELD_BYTES // max(row_bytes, 1))))
        if fitting == wanted:
            break
    return fitting


def max_shared_value_bytes(column: Any, stream: BinaryIO) -> int:
    """Return the maximum bytes of a value that several rows of a column share.

    With a dictionary, this is the dictionary's size.
    """
    if SHARED_ENCODINGS.isdisjoint(column.encodings):
        return 0
    if "DELTA_BYTE_ARRAY" in column.encodings:
        return int(column.total_uncompressed_size)
    stream.seek(first_page_offset(column))
    kind, size = parse_page_header(stream.read(HEADER_BYTES))
    return size if kind == DICTIONARY_PAGE else int(column.total_uncompressed_size)


def max_dictionary_value_bytes(column: Any, stream: BinaryIO) -> int:
    """Return the same as `max_shared_value_bytes`, from the dictionary's texts if they can be read."""
    import pyarrow as pa  # slow to import, and only these formats need it

    upper_bound = max_shared_value_bytes(column, stream)
    if (
        "DELTA_BYTE_ARRAY" in column.encodings
        or not 0 < upper_bound <= MAX_INSPECTED_BYTES
        or column.compression not in CODECS
    ):
        return upper_bound
    stream.seek(first_page_offset(column))
    page = parse_dictionary_header(stream.read(HEADER_BYTES))
    if page is None:
        return upper_bound
    size, packed, count, begins = page
    if column.physical_type == FIXED_LENGTH_TYPE:
        return -(-size // max(count, 1))
    stream.seek(first_page_offset(column) + begins)
    data = stream.read(packed)
    codec = CODECS[column.compression]
    try:
        return longest_text_bytes(data if codec is None else pa.Codec(codec).decompress(data, size, asbytes=True))
    except (pa.ArrowException, OSError):
        return upper_bound


def first_page_offset(column: Any) -> int:
    """Return the position of the first page: the dictionary, if before the data."""
    return int(min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset))


def longest_text_bytes(data: bytes) -> int:
    """Return the bytes of the longest of several length-prefixed texts."""
    max_length = position = 0
    while position + LENGTH.size <= len(data):
        (size,) = LENGTH.unpack_from(data, position)
        position += LENGTH.size + size
        if size > max_length:
            max_length = size
    return int(max_length)


def parse_page_header(data: bytes) -> tuple[int, int]:
    """Return the kind and the decompressed size of a page.

    (-1, 0) if there is no header. These are the first two numbers of its header in Thrift's compact protocol, which the
    reader uses as well.
    """
    found, _ = parse_varints(data, 0, 2)
    return (found[0], found[1]) if len(found) == 2 else (-1, 0)


def parse_dictionary_header(data: bytes) -> tuple[int, int, int, int] | None:
    """Return a dictionary's decompressed and compressed size, number of values, and offset after its header.

    None if the data is not such a header, or has unknown fields.
    """
    found, position = parse_varints(data, 0, 4)  # kind, both sizes, and in some files a checksum
    if len(found) < 3 or found[0] != DICTIONARY_PAGE or data[position : position + 1] != DICTIONARY_FIELD[len(found)]:
        return None
    value_header, position = parse_varints(data, position + 1, 2)  # the number of values, and their encoding
    position += data[position : position + 1] in SORTED_FIELD
    if len(value_header) < 2 or data[position : position + 2] != b"\0\0":
        return None
    return found[1], found[2], value_header[0], position + 2


def parse_varints(data: bytes, position: int, limit: int) -> tuple[list[int], int]:
    """Return the 32-bit numbers in the fields from `position` on, and the next position.

    At most `limit` numbers are read.
    """
    found: list[int] = []
    while len(found) < limit and data[position : position + 1] == b"\x15":  # the next field is a 32-bit number
        position, value, shift = position + 1, 0, 0
        while position < len(data):
            byte = data[position]
            position, value, shift = position + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                break
        found.append((value >> 1) ^ -(value & 1))
    return found, position
