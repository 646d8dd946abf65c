"""The index of records (`recipes.record_index`) on its way into the store, while the records are."""

import hashlib
from collections.abc import Mapping
from typing import Any

from recipes.record_index import RECORDS, Segments, file_name
from recipes.records.fingerprint import fingerprint
from recipes.storage.manifest import Chunk, FileRecord
from resources.object_store.chunk_upload import ChunkStore


class IndexFile:
    """A file whose chunks are its segments: what versions share of it is stored once, held and removed as all chunks are."""

    def __init__(self, chunks: ChunkStore) -> None:
        self._chunks = chunks
        self._segments = Segments()
        self._digest = hashlib.sha256()
        self._stored: list[Chunk] = []

    def add(self, row: Mapping[str, Any], line: bytes) -> None:
        found = fingerprint(row, line)
        if segment := self._segments.add(found.text, found.record):
            self._store(segment)

    def close(self) -> FileRecord:
        if segment := self._segments.finish():
            self._store(segment)
        size = sum(chunk.size for chunk in self._stored)
        return FileRecord(path=file_name(RECORDS), sha256=self._digest.hexdigest(), size=size, chunks=tuple(self._stored))

    def _store(self, segment: bytes) -> None:
        sha256 = hashlib.sha256(segment).hexdigest()
        self._digest.update(segment)
        self._chunks.put({sha256: segment})
        self._stored.append(Chunk(sha256=sha256, size=len(segment)))
