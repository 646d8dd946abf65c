"""Lines that are found by a key, each read of two places of two files, however many there are.

One file has JSON objects with the member `key`, in the order of their keys' hashes. These are spread evenly, and cut
into buckets of some 16 lines each; the index has where each bucket begins, and where the last one ends, in 8 bytes each.
"""

import hashlib
import json
import struct
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LINES_OF_A_BUCKET = 16
OFFSET = struct.Struct("<Q")

Read = Callable[[int, int], bytes]
"""Bytes of a file from the first to before the second place."""


def hash_of(key: str) -> int:
    """64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def bucket_of(hashed: int, buckets: int) -> int:
    return hashed * buckets >> 64


def write(lines: Path, index: Path, count: int, records: Iterable[tuple[int, bytes]]) -> None:
    """Write `count` lines, given with the hashes of their keys in the order of these."""
    buckets = max(1, count // LINES_OF_A_BUCKET)
    begins, size = array("Q"), 0
    with lines.open("wb") as out:
        for hashed, line in records:
            begins.extend([size] * (bucket_of(hashed, buckets) + 1 - len(begins)))
            size += out.write(line + b"\n")
    begins.extend([size] * (buckets + 1 - len(begins)))
    index.write_bytes(b"".join(map(OFFSET.pack, begins)))


def find(key: str, read_lines: Read, read_index: Read, index_bytes: int) -> Any:
    """The object with the key; None where there is none."""
    bucket = bucket_of(hash_of(key), index_bytes // OFFSET.size - 1)
    begin, end = struct.unpack("<QQ", read_index(OFFSET.size * bucket, OFFSET.size * (bucket + 2)))
    found = (json.loads(line) for line in read_lines(begin, end).split(b"\n") if line)
    return next((each for each in found if each["key"] == key), None)


def reader(path: Path) -> Read:
    """Of a file of this machine."""

    def read(begin: int, end: int) -> bytes:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    return read
