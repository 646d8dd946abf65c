"""Lines that are found by a key, each read of two places of two files, however many there are.

One file has JSON objects with the member `key`, in the order of their keys' hashes. These are spread evenly, and cut
into buckets of some 16 lines each; the index has where each bucket begins with a checksum of its bytes, in 8 bytes each,
and where the last one ends: what is answered of a key was recorded of it, without a look at the rest of the files.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from recipes.storage.locations import BrokenArtifact

LINES_PER_BUCKET = 16
BUCKET_ENTRY, END_ENTRY = struct.Struct("<Q8s"), struct.Struct("<Q")
ENTRY_WITH_NEXT = struct.Struct("<Q8sQ")

ReadRange = Callable[[int, int], bytes]
"""Bytes of a file from the first to before the second place."""


def hash_key(key: str) -> int:
    """64 bits, the same on every machine."""
    return int.from_bytes(checksum(key.encode("utf-8", "surrogatepass")))


def checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def bucket_number(hashed: int, buckets: int) -> int:
    return hashed * buckets >> 64


def write_key_index(lines: Path, index: Path, count: int, records: Iterable[tuple[int, bytes]]) -> None:
    """Write `count` lines, given with the hashes of their keys in the order of these."""
    buckets, size = max(1, count // LINES_PER_BUCKET), 0
    filled = groupby(records, key=lambda record: bucket_number(record[0], buckets))
    following = next(filled, None)
    with lines.open("wb") as out, index.open("wb") as entries:
        for bucket in range(buckets):
            content = b""
            if following is not None and following[0] == bucket:
                content = b"".join(line + b"\n" for _, line in following[1])
                following = next(filled, None)
            entries.write(BUCKET_ENTRY.pack(size, checksum(content)))
            size += out.write(content)
        entries.write(END_ENTRY.pack(size))


def find_by_key(key: str, read_lines: ReadRange, read_index: ReadRange, index_bytes: int) -> Any:
    """The object with the key; None where there is none.

    Raises:
        BrokenArtifact: what was read is not what was written.
    """
    place = BUCKET_ENTRY.size * bucket_number(hash_key(key), index_bytes // BUCKET_ENTRY.size)
    begin, recorded, end = ENTRY_WITH_NEXT.unpack(read_index(place, place + ENTRY_WITH_NEXT.size))
    content = read_lines(begin, end) if begin < end else b""
    if len(content) != end - begin or checksum(content) != recorded:
        raise BrokenArtifact("a line that is found by its key is not what was recorded")
    found = (json.loads(line) for line in content.split(b"\n") if line)
    return next((each for each in found if each["key"] == key), None)


def make_file_reader(path: Path) -> ReadRange:
    """Of a file of this machine."""

    def read(begin: int, end: int) -> bytes:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    return read
