"""Uncompressed memory size of Parquet and Arrow files, estimated before reading."""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import SEEK_END
from typing import Any, BinaryIO

# How much memory the batches of an Arrow file become, told before they are read: 8 KB that are unpacked as one batch
# became 256 MB.
#
# Where buffers are packed, each begins with the size that it has unpacked, by which the reader takes memory. Which
# buffers there are say the messages, in FlatBuffers as Arrow's `Message.fbs` and `File.fbs` have them.

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


# How much memory the pages of a Parquet file may become, told before they are read: 762 bytes with a text of 10 MiB in a
# dictionary, which 512 rows name, became 6 GB.

MAX_HELD_BYTES = 512 << 20
"""About how many bytes of texts are held at once that rows repeat."""
MAX_INSPECTED_BYTES = 4 << 20
"""Bytes of a dictionary whose texts are looked at one by one; writers end theirs at one MiB."""
TEXT_TYPE, FIXED_LENGTH_TYPE = "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"
HEADER_BYTES = 64
DICTIONARY_PAGE = 2
DICTIONARY_FIELD = {3: b"\x4c", 4: b"\x3c"}
"""How the field of a page header begins that is a dictionary's own, behind three numbers or four."""
SORTED_FIELD = (b"\x11", b"\x12")
LENGTH = struct.Struct("<I")
CODECS: Mapping[str, str | None] = {
    "UNCOMPRESSED": None,
    "SNAPPY": "snappy",
    "GZIP": "gzip",
    "BROTLI": "brotli",
    "ZSTD": "zstd",
}
"""Compressions that have one form in every file: LZ4 has two."""
SHARED_ENCODINGS = frozenset({"RLE_DICTIONARY", "PLAIN_DICTIONARY", "DELTA_BYTE_ARRAY"})
"""Encodings in which values share bytes."""


def group_columns(group: Any) -> list[Any]:
    """What a row group says of each of its columns."""
    return [group.column(index) for index in range(group.num_columns)]


def min_group_size(group: Any) -> int:
    """Bytes that a row group has in memory at least: all its pages, and a byte for each value, of which a page may say once
    that it comes a billion times.
    """
    return sum(max(column.total_uncompressed_size, column.num_values) for column in group_columns(group))


def max_batch_rows(group: Any, stream: BinaryIO, wanted: int) -> int:
    """How many rows of a row group, `wanted` at most, may be held at once if each of their texts were the longest that it
    can be. Dictionaries are looked into only where their sizes leave that open: by those alone, a hundred columns of short
    texts were read a few rows at a time.
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
    """Bytes that the longest value that several rows of a column share has at most: as many as its dictionary, where one is
    named by them.
    """
    if SHARED_ENCODINGS.isdisjoint(column.encodings):
        return 0
    if "DELTA_BYTE_ARRAY" in column.encodings:
        return int(column.total_uncompressed_size)
    stream.seek(first_page_offset(column))
    kind, size = parse_page_header(stream.read(HEADER_BYTES))
    return size if kind == DICTIONARY_PAGE else int(column.total_uncompressed_size)


def max_dictionary_value_bytes(column: Any, stream: BinaryIO) -> int:
    """What `max_shared_value_bytes` tells, by the texts of the dictionary themselves where they can be read."""
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
    """Where the reader begins: at the dictionary, if that lies before the data."""
    return int(min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset))


def longest_text_bytes(data: bytes) -> int:
    """Bytes of the longest of texts that each stand behind their length."""
    max_length = position = 0
    while position + LENGTH.size <= len(data):
        (size,) = LENGTH.unpack_from(data, position)
        position += LENGTH.size + size
        if size > max_length:
            max_length = size
    return int(max_length)


def parse_page_header(data: bytes) -> tuple[int, int]:
    """Kind and unpacked size of a page: the first two numbers of its header, in Thrift's compact form. The reader unpacks by
    the same ones. (-1, 0) where there is no header.
    """
    found, _ = parse_varints(data, 0, 2)
    return (found[0], found[1]) if len(found) == 2 else (-1, 0)


def parse_dictionary_header(data: bytes) -> tuple[int, int, int, int] | None:
    """The unpacked and the packed size of a dictionary, how many values it has, and where it begins behind the start of its
    header; None where that is no such header, or has fields that nobody knows here.
    """
    found, position = parse_varints(data, 0, 4)  # kind, both sizes, and in some files a checksum
    if len(found) < 3 or found[0] != DICTIONARY_PAGE or data[position : position + 1] != DICTIONARY_FIELD[len(found)]:
        return None
    value_header, position = parse_varints(data, position + 1, 2)  # how many, and how they are written
    position += data[position : position + 1] in SORTED_FIELD
    if len(value_header) < 2 or data[position : position + 2] != b"\0\0":
        return None
    return found[1], found[2], value_header[0], position + 2


def parse_varints(data: bytes, position: int, limit: int) -> tuple[list[int], int]:
    """The numbers of 32 bits in the fields from `position` on, `limit` of them, and where they end."""
    found: list[int] = []
    while len(found) < limit and data[position : position + 1] == b"\x15":  # the next field, a number of 32 bits
        position, value, shift = position + 1, 0, 0
        while position < len(data):
            byte = data[position]
            position, value, shift = position + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                break
        found.append((value >> 1) ^ -(value & 1))
    return found, position
