"""Find records by fingerprint in a sorted index next to their artifact."""

import hashlib
import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from recipes.records.fingerprint import Fingerprint, encode_canonical_line, fingerprint_record
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.locations import chunk_uri
from recipes.storage.manifest import Artifact, FileRecord, Manifest
from recipes.storage.object_transfer import StoredObject

# The index of an artifact of records maps fingerprints to record numbers, in sorted segments of which lookups read little.
#
# It is stored at the artifact's URI + `.index`, published afterwards, and has the artifact as its input; otherwise it is
# ignored. `records.index` finds records by text. If records were derived from others, `origins.index` finds them by those.
#
# A segment ends at a record whose hash matches a pattern. So two versions that share most records share most segments, as
# they share the chunks of their files. Without chunks (`publish_record_index`), a segment is a file: `records.index`, then
# `records-00001.index`. The manifest lists them in order.
#
# Keys are hashes, which are uniformly distributed: a key's position is known within a few square roots of the segment's
# length, which replaces a table of fences.

RECORDS, ORIGINS = "records", "origins"
INDEX_KIND = "index"
INDEX_ENTRY = np.dtype([("key", "<u8"), ("value", "<u8"), ("number", "<u4")])
"""`key` is a text's hash and `value` the record's; in origins, `key` is the source record's and `value` the text's."""
AVERAGE_SEGMENT_ENTRIES, MIN_SEGMENT_ENTRIES, MAX_SEGMENT_ENTRIES = 1 << 15, 1 << 13, 1 << 17
"""Number of entries in a segment stored as a chunk; the last one may be smaller."""
SEARCH_WIDTH_ROOTS = 4
"""Search window in square roots of the length: eight standard deviations."""

Entries = NDArray[np.void]
Hashes = NDArray[np.uint64]


def index_uri(artifact_uri: str) -> str:
    return f"{artifact_uri}.index"


def index_file_name(index_name: str, number: int = 0) -> str:
    """Return the name of file `number`, from 0, of `RECORDS` or `ORIGINS`."""
    return f"{index_name}-{number:05}.index" if number else f"{index_name}.index"


class SegmentBuilder:
    """Divides a stream of entries into segments; records are numbered within each."""

    def __init__(self) -> None:
        self._keys, self._values = array("Q"), array("Q")

    def add(self, key: int, value: int) -> bytes | None:
        """Add the next record's entry; return the segment if it ends here."""
        self._keys.append(key)
        self._values.append(value)
        length = len(self._keys)
        if (value % AVERAGE_SEGMENT_ENTRIES == 0 and length >= MIN_SEGMENT_ENTRIES) or length == MAX_SEGMENT_ENTRIES:
            return self.finish()
        return None

    def finish(self) -> bytes:
        """Return the remaining segment, which may be empty."""
        segment = sort_segment(as_hashes(self._keys), as_hashes(self._values))
        self._keys, self._values = array("Q"), array("Q")
        return segment


def as_hashes(collected: "array[int]") -> Hashes:
    return np.frombuffer(collected, np.uint64)


def sort_segment(keys: Hashes, values: Hashes) -> bytes:
    """Sort the entries of records 0, 1, ... by key.

    Needs 64 bytes of memory per record, including the arguments.
    """
    order = np.argsort(keys, kind="stable")
    entries = np.empty(len(keys), INDEX_ENTRY)
    entries["key"], entries["value"], entries["number"] = keys[order], values[order], order
    return entries.tobytes()


def build_index_manifest(artifact: Artifact, files: tuple[FileRecord, ...]) -> Manifest:
    return Manifest(kind=INDEX_KIND, files=files, inputs={"records": artifact.digest})


@dataclass(frozen=True)
class IndexHit:
    """An index entry found for a key, and its record's number."""

    key: int
    value: int
    number: int


@dataclass(frozen=True)
class Segment:
    """A sorted run of entries in the store."""

    uri: str
    count: int

    def find(self, store: Store, keys: Collection[int]) -> list[IndexHit]:
        """Return the entries of keys, numbered from 0.

        For few keys, little more than their entries is read.
        """
        source = store.open_known_size(self.uri, self.count * INDEX_ENTRY.itemsize)
        if len(keys) * 2 * self._width < self.count:
            return [found for key in keys for found in self._among(self._around(source, key), [key])]
        # In pieces: a segment may be long, and many are searched at the same time.
        runs = (
            self._read(source, low, min(low + MAX_SEGMENT_ENTRIES, self.count))
            for low in range(0, self.count, MAX_SEGMENT_ENTRIES)
        )
        return [found for run in runs for found in self._among(run, keys)]

    @property
    def _width(self) -> int:
        """Half the search window: entries before and after the expected position of a key."""
        return SEARCH_WIDTH_ROOTS * math.isqrt(self.count) + 1

    def _around(self, source: StoredObject, key: int) -> Entries:
        """Return all entries of a key, and some around them."""
        width = self._width
        guess = key * self.count >> 64
        low, high = max(0, guess - width), min(self.count, guess + width)
        while True:
            entries = self._read(source, low, high)
            # Only needed if one key has very many entries, which shift all others.
            width *= 2
            if low and entries["key"][0] >= key:
                low = max(0, low - width)
            elif high < self.count and entries["key"][-1] <= key:
                high = min(self.count, high + width)
            else:
                return entries

    def _read(self, source: StoredObject, low: int, high: int) -> Entries:
        return np.frombuffer(b"".join(source.chunks(low * INDEX_ENTRY.itemsize, high * INDEX_ENTRY.itemsize)), INDEX_ENTRY)

    def _among(self, entries: Entries, keys: Collection[int]) -> list[IndexHit]:
        rows = entries[np.isin(entries["key"], np.array(list(keys), np.uint64))].tolist()
        return [IndexHit(*row) for row in rows]


@dataclass(frozen=True)
class RecordIndex:
    """The segments of an artifact's index, in the order of its records."""

    records: tuple[Segment, ...]
    origins: tuple[Segment, ...]


def find_index(store: Store, artifact: Artifact) -> RecordIndex | None:
    """Return the index of an artifact, or None."""
    uri = index_uri(artifact.uri)
    try:
        manifest = Manifest.model_validate_json(store.get_bytes(f"{uri}/{MANIFEST_FILE}"))
    except (FileNotFoundError, ValidationError):
        return None
    if manifest.kind != INDEX_KIND or manifest.inputs.get("records") != artifact.digest:
        return None
    records, origins = (
        tuple(segment for file in manifest.files if file.path.startswith(index_name) for segment in list_segments(uri, file))
        for index_name in (RECORDS, ORIGINS)
    )
    return RecordIndex(records, origins)


def list_segments(uri: str, file: FileRecord) -> Iterator[Segment]:
    """Yield the segments of a file.

    Its chunks, or the whole file if it has none.
    """
    parts = [(chunk_uri(uri, chunk.sha256), chunk.size) for chunk in file.chunks] or [(f"{uri}/{file.path}", file.size)]
    return (Segment(location, size // INDEX_ENTRY.itemsize) for location, size in parts if size)


def number_hits(segments: Sequence[Segment], found: Mapping[Segment, Sequence[IndexHit]]) -> Iterator[IndexHit]:
    """Renumber the entries of each segment as records of the whole artifact, from 1."""
    first = 1
    for segment in segments:
        yield from (replace(each, number=first + each.number) for each in found[segment])
        first += segment.count


def fingerprint_line(line: bytes) -> Fingerprint:
    """Return the fingerprint of a record from any JSON form. Raises msgspec.DecodeError."""
    row = msgspec.json.decode(line, type=dict)
    return fingerprint_record(row, encode_canonical_line(row))


# The index of records whose files are not in chunks, as a preparation writes them: built from hashes, part by part.
#
# Nothing is shared with other versions' indexes, so a segment ends after `MAX_SEGMENT_RECORDS` and is stored as a file.

MAX_SEGMENT_RECORDS = 1 << 22
"""Number of entries in a segment: sorting one takes 270 MB, and ten billion records have 2,400 segments."""

HashPairs = NDArray[np.uint64]
"""Keys and values of entries: shape [records, 2]."""


def publish_record_index(
    store: Store, artifact: Artifact, records: Iterable[HashPairs], origins: Iterable[HashPairs] | None = None
) -> None:
    """Index an artifact's records whose files are not in chunks.

    Holds `MAX_SEGMENT_RECORDS` records in memory.

    Args:
        records: text and record hashes in the order of records, in batches of any size.
        origins: record hash of each record's source, if it is another record, and its own text hash.
    """
    uri = index_uri(artifact.uri)
    files = () if origins is None else store_segments(store, uri, ORIGINS, origins)
    store.put_manifest(uri, build_index_manifest(artifact, (*files, *store_segments(store, uri, RECORDS, records))))


def store_segments(store: Store, uri: str, index_name: str, pairs: Iterable[HashPairs]) -> tuple[FileRecord, ...]:
    """Store the files of an index one after the other."""
    return tuple(
        store_segment(store, uri, index_file_name(index_name, number), run)
        for number, run in enumerate(cut_into_segments(pairs, MAX_SEGMENT_RECORDS))
    )


def store_segment(store: Store, uri: str, name: str, run: HashPairs) -> FileRecord:
    segment = sort_segment(run[:, 0], run[:, 1])
    store.put_bytes(f"{uri}/{name}", segment)
    return FileRecord(path=name, sha256=hashlib.sha256(segment).hexdigest(), size=len(segment))


def cut_into_segments(parts: Iterable[HashPairs], length: int) -> Iterator[HashPairs]:
    """Divide the rows of all parts into runs of `length`.

    The last one has the rest, which may be empty.
    """
    waiting, room = [np.empty((0, 2), np.uint64)], length
    for part in parts:
        # Only if more rows follow: rows that fit into one run stay one.
        while len(part) > room:
            run = np.concatenate([*waiting, part[:room]])
            waiting, part, room = [], part[room:], length
            yield run
        waiting.append(part)
        room -= len(part)
    yield np.concatenate(waiting)
