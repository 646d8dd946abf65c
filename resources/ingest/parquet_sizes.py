"""How much memory the pages of a Parquet file may become, told before they are read: 762 bytes with a text of 10 MiB in a
dictionary, which 512 rows name, became 6 GB.
"""

import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

HELD = 512 << 20
"""About how many bytes of texts are held at once that rows repeat."""
LOOKED_INTO = 4 << 20
"""Bytes of a dictionary whose texts are looked at one by one; writers end theirs at one MiB."""
TEXT, OF_ONE_LENGTH = "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"
HEADER_BYTES = 64
DICTIONARY_PAGE = 2
OF_DICTIONARY = {3: b"\x4c", 4: b"\x3c"}
"""How the field of a page header begins that is a dictionary's own, behind three numbers or four."""
IS_SORTED = (b"\x11", b"\x12")
LENGTH = struct.Struct("<I")
UNPACKED_BY: Mapping[str, str | None] = {
    "UNCOMPRESSED": None,
    "SNAPPY": "snappy",
    "GZIP": "gzip",
    "BROTLI": "brotli",
    "ZSTD": "zstd",
}
"""Compressions that have one form in every file: LZ4 has two."""
SHARED = frozenset({"RLE_DICTIONARY", "PLAIN_DICTIONARY", "DELTA_BYTE_ARRAY"})
"""Encodings in which values share bytes."""


def columns_of(group: Any) -> list[Any]:
    """What a row group says of each of its columns."""
    return [group.column(index) for index in range(group.num_columns)]


def least_size(group: Any) -> int:
    """Bytes that a row group has in memory at least: all its pages, and a byte for each value, of which a page may say once
    that it comes a billion times.
    """
    return sum(max(column.total_uncompressed_size, column.num_values) for column in columns_of(group))


def rows_that_fit(group: Any, stream: BinaryIO, wanted: int) -> int:
    """How many rows of a row group, `wanted` at most, may be held at once if each of their texts were the longest that it
    can be. Dictionaries are looked into only where their sizes leave that open: by those alone, a hundred columns of short
    texts were read a few rows at a time.
    """
    texts = [column for column in columns_of(group) if column.physical_type in (TEXT, OF_ONE_LENGTH)]
    fitting = wanted
    for longest in (longest_shared, longest_said):
        of_a_row = sum(longest(column, stream) * max(1, column.num_values // max(group.num_rows, 1)) for column in texts)
        fitting = int(max(1, min(wanted, HELD // max(of_a_row, 1))))
        if fitting == wanted:
            break
    return fitting


def longest_shared(column: Any, stream: BinaryIO) -> int:
    """Bytes that the longest value that several rows of a column share has at most: as many as its dictionary, where one is
    named by them.
    """
    if SHARED.isdisjoint(column.encodings):
        return 0
    if "DELTA_BYTE_ARRAY" in column.encodings:
        return int(column.total_uncompressed_size)
    stream.seek(first_page(column))
    kind, size = page_header(stream.read(HEADER_BYTES))
    return size if kind == DICTIONARY_PAGE else int(column.total_uncompressed_size)


def longest_said(column: Any, stream: BinaryIO) -> int:
    """What `longest_shared` tells, by the texts of the dictionary themselves where they can be read."""
    import pyarrow as pa  # slow to import, and only these formats need it

    at_most = longest_shared(column, stream)
    if "DELTA_BYTE_ARRAY" in column.encodings or not 0 < at_most <= LOOKED_INTO or column.compression not in UNPACKED_BY:
        return at_most
    stream.seek(first_page(column))
    page = dictionary_page(stream.read(HEADER_BYTES))
    if page is None:
        return at_most
    size, packed, count, begins = page
    if column.physical_type == OF_ONE_LENGTH:
        return -(-size // max(count, 1))
    stream.seek(first_page(column) + begins)
    data = stream.read(packed)
    codec = UNPACKED_BY[column.compression]
    try:
        return longest_text(data if codec is None else pa.Codec(codec).decompress(data, size, asbytes=True))
    except (pa.ArrowException, OSError):
        return at_most


def first_page(column: Any) -> int:
    """Where the reader begins: at the dictionary, if that lies before the data."""
    return int(min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset))


def longest_text(data: bytes) -> int:
    """Bytes of the longest of texts that each stand behind their length."""
    longest = position = 0
    while position + LENGTH.size <= len(data):
        (size,) = LENGTH.unpack_from(data, position)
        position += LENGTH.size + size
        if size > longest:
            longest = size
    return int(longest)


def page_header(data: bytes) -> tuple[int, int]:
    """Kind and unpacked size of a page: the first two numbers of its header, in Thrift's compact form. The reader unpacks by
    the same ones. (-1, 0) where there is no header.
    """
    found, _ = numbers(data, 0, 2)
    return (found[0], found[1]) if len(found) == 2 else (-1, 0)


def dictionary_page(data: bytes) -> tuple[int, int, int, int] | None:
    """The unpacked and the packed size of a dictionary, how many values it has, and where it begins behind the start of its
    header; None where that is no such header, or has fields that nobody knows here.
    """
    found, position = numbers(data, 0, 4)  # kind, both sizes, and in some files a checksum
    if len(found) < 3 or found[0] != DICTIONARY_PAGE or data[position : position + 1] != OF_DICTIONARY[len(found)]:
        return None
    of_values, position = numbers(data, position + 1, 2)  # how many, and how they are written
    position += data[position : position + 1] in IS_SORTED
    if len(of_values) < 2 or data[position : position + 2] != b"\0\0":
        return None
    return found[1], found[2], of_values[0], position + 2


def numbers(data: bytes, position: int, most: int) -> tuple[list[int], int]:
    """The numbers of 32 bits in the fields from `position` on, `most` of them, and where they end."""
    found: list[int] = []
    while len(found) < most and data[position : position + 1] == b"\x15":  # the next field, a number of 32 bits
        position, value, shift = position + 1, 0, 0
        while position < len(data):
            byte = data[position]
            position, value, shift = position + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                break
        found.append((value >> 1) ^ -(value & 1))
    return found, position
