"""How much memory the pages of a Parquet file may become, told before they are read: 762 bytes with a text of 10 MiB in a
dictionary, which 512 rows name, became 6 GB.
"""

from typing import Any, BinaryIO

HELD = 512 << 20
"""About how many bytes of texts are held at once that rows repeat."""
HEADER_BYTES = 64
DICTIONARY_PAGE = 2
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


def rows_that_fit(group: Any, stream: BinaryIO) -> int:
    """How many rows of a row group may be held at once, if each of their texts were the longest that it can be."""
    of_a_row = sum(
        longest_shared(column, stream) * max(1, column.num_values // max(group.num_rows, 1))
        for column in columns_of(group)
        if column.physical_type == "BYTE_ARRAY"
    )
    return int(max(1, HELD // max(of_a_row, 1)))


def longest_shared(column: Any, stream: BinaryIO) -> int:
    """Bytes of the longest value that several rows of a column may share: as much as its dictionary has, where one is named
    by them.
    """
    if SHARED.isdisjoint(column.encodings):
        return 0
    if "DELTA_BYTE_ARRAY" in column.encodings:
        return int(column.total_uncompressed_size)
    stream.seek(column.dictionary_page_offset or column.data_page_offset)
    kind, size = page_header(stream.read(HEADER_BYTES))
    return size if kind == DICTIONARY_PAGE else int(column.total_uncompressed_size)


def page_header(data: bytes) -> tuple[int, int]:
    """Kind and unpacked size of a page: the first two numbers of its header, in Thrift's compact form. The reader unpacks by
    the same ones. (-1, 0) where there is no header.
    """
    found, position = [], 0
    for _ in range(2):
        if data[position : position + 1] != b"\x15":  # the next field, a number of 32 bits
            return -1, 0
        position, value, shift = position + 1, 0, 0
        while position < len(data):
            byte = data[position]
            position, value, shift = position + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                break
        found.append((value >> 1) ^ -(value & 1))
    return found[0], found[1]
