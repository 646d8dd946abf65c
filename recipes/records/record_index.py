"""The index of records whose files are no chunks, such as a preparation leaves: made of their hashes, part by part.

Nothing is shared with another version's, so a segment (`recipes.record_index`) ends after so many records, and is a file.
"""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from recipes.record_index import ORIGINS, RECORDS, file_name, index_manifest, index_uri, sorted_segment
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, FileRecord

LONGEST = 1 << 22
"""Entries of a segment: it is sorted in 270 MB, and of ten billion records 2,400 are asked."""

Pairs = NDArray[np.uint64]
"""Key and value of the entries of some records, a row each."""


def publish_hashes(
    store: Store, artifact: Artifact, records: Iterable[Pairs], origins: Iterable[Pairs] | None = None
) -> None:
    """Index the records of an artifact whose files are no chunks. Holds `LONGEST` of them at once.

    Args:
        records: their fingerprints, the text's hash and the record's, in their order: any number at once.
        origins: the record hash of what each was made of, where that is another record, and its own text's hash.
    """
    uri = index_uri(artifact.uri)
    files = () if origins is None else stored_segments(store, uri, ORIGINS, origins)
    store.put_manifest(uri, index_manifest(artifact, (*files, *stored_segments(store, uri, RECORDS, records))))


def stored_segments(store: Store, uri: str, of: str, pairs: Iterable[Pairs]) -> tuple[FileRecord, ...]:
    """The files of an index, each in the store before the next is made."""
    return tuple(stored(store, uri, file_name(of, number), run) for number, run in enumerate(runs(pairs, LONGEST)))


def stored(store: Store, uri: str, name: str, run: Pairs) -> FileRecord:
    segment = sorted_segment(run[:, 0], run[:, 1])
    store.put_bytes(f"{uri}/{name}", segment)
    return FileRecord(path=name, sha256=hashlib.sha256(segment).hexdigest(), size=len(segment))


def runs(parts: Iterable[Pairs], length: int) -> Iterator[Pairs]:
    """The rows of all parts, cut anew into runs of `length`. The last one has what is left, which may be nothing at all."""
    waiting, room = [np.empty((0, 2), np.uint64)], length
    for part in parts:
        # Only where more follow: what fits in one run is one.
        while len(part) > room:
            run = np.concatenate([*waiting, part[:room]])
            waiting, part, room = [], part[room:], length
            yield run
        waiting.append(part)
        room -= len(part)
    yield np.concatenate(waiting)
