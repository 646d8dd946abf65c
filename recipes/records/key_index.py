"""A lookup table of JSON lines by key, with two reads per lookup.

One file has JSON objects with the member `key`, sorted by hash of the key, in buckets of about 16 lines. The index file
holds each bucket's start and the checksum of its bytes, 8 bytes each, and the end of the last one: a lookup is verified
without reading the rest of the files.
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
"""Returns a file's bytes from the first to the second offset (exclusive)."""


def hash_key(key: str) -> int:
    """Hash a key to 64 bits, identically on every machine."""
    return int.from_bytes(checksum(key.encode("utf-8", "surrogatepass")))


def checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def bucket_number(hashed: int, buckets: int) -> int:
    return hashed * buckets >> 64


def write_key_index(lines: Path, index: Path, count: int, records: Iterable[tuple[int, bytes]]) -> None:
    """Write `count` lines, given with their keys' hashes and sorted by them."""
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
    """Return the object with the key, or None.

    Raises:
        BrokenArtifact: the bytes read differ from those written.
    """
    place = BUCKET_ENTRY.size * bucket_number(hash_key(key), index_bytes // BUCKET_ENTRY.size)
    begin, recorded, end = ENTRY_WITH_NEXT.unpack(read_index(place, place + ENTRY_WITH_NEXT.size))
    content = read_lines(begin, end) if begin < end else b""
    if len(content) != end - begin or checksum(content) != recorded:
        raise BrokenArtifact("a bucket of the key index differs from its checksum")
    found = (json.loads(line) for line in content.split(b"\n") if line)
    return next((each for each in found if each["key"] == key), None)


def make_file_reader(path: Path) -> ReadRange:
    """Return a reader of a local file."""

    def read(begin: int, end: int) -> bytes:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    return read
