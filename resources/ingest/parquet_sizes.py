"""How much memory the pages of a Parquet file may become, told before they are read: 762 bytes with a text of 10 MiB in a
dictionary, which 512 rows name, became 6 GB.
"""

import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

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
