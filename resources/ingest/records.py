"""Records in their one form: canonical JSON lines, in files that several readers can share.

A line is JSON with sorted keys, no spaces, UTF-8, the shortest form of each number, and ends with a newline. Equal records
are equal bytes, so the hash of all lines is the identity of a dataset's content, whatever files and format they came in.
"""

import hashlib
from typing import Any

from recipes.storage.manifest import FileRecord
from resources.ingest.column_schema import SchemaOfMany
from resources.ingest.record_index import IndexFile
from resources.object_store.chunk_upload import ChunkedFile, ChunkStore

FILE_BYTES = 256 << 20
"""A file of records is full with the record that reaches this size."""
LINES_BYTES = 1 << 20


class RecordsWriter:
    def __init__(self, chunks: ChunkStore) -> None:
        self._chunks = chunks
        self._file: ChunkedFile | None = None
        self._lines: list[bytes] = []
        self._length = 0
        self._written: list[FileRecord] = []
        self._index = IndexFile(chunks)
        self.schema = SchemaOfMany()

    def add(self, row: dict[str, Any], line: bytes) -> None:
        """Take a record and its canonical line."""
        self.schema.see(row)
        self._index.add(row, line)
        self._lines.append(line)
        self._length += len(line) + 1
        if self._length >= LINES_BYTES:
            self._flush()

    def close(self) -> tuple[tuple[FileRecord, ...], FileRecord, str]:
        """The files and their index, once all are in the store, and the identity of their content: the SHA-256 of the one
        file, or of those of all files, which are cut at places that depend on the lines alone."""
        self._flush()
        self._end_file()
        hashes = [file.sha256 for file in self._written]
        identity = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
        return tuple(self._written), self._index.close(), identity

    def _flush(self) -> None:
        if not self._lines:
            return
        data = b"\n".join(self._lines) + b"\n"
        self._lines, self._length = [], 0
        if self._file is None:
            self._file = ChunkedFile(self._chunks, f"records-{len(self._written):05}.jsonl")
        self._file.write(data)
        if self._file.size >= FILE_BYTES:
            self._end_file()

    def _end_file(self) -> None:
        if self._file is not None:
            self._written.append(self._file.close())
            self._file = None
