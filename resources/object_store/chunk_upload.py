"""Store files in chunks while they are read.

Each chunk is stored once, even if several versions have it.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from recipes.storage.artifact_store import Store
from recipes.storage.locations import chunk_uri
from recipes.storage.manifest import Chunk, FileRecord
from resources.object_store.chunk_claims import ChunkClaims

BATCH_BYTES = 8 << 20
"""Bytes that are claimed together. With `Chunker`'s buffer, this is the memory used by a file that is being written."""


BATCH_CHUNKS = 500
"""Maximum number of chunks that are claimed together: on SQLite a claim blocks all other writes."""


UPLOAD_THREADS = 8
"""Threads: at most two of them hash and split a file; each of the others uploads a chunk."""


@dataclass(frozen=True)
class ChunkStore:
    """Stores chunks of the dataset at `folder_uri` on behalf of one holder of `claims`."""

    store: Store
    claims: ChunkClaims
    holder: str
    folder_uri: str
    pool: ThreadPoolExecutor
    buffer: dict[str, bytes] = field(default_factory=dict)

    def put(self, chunks: dict[str, bytes]) -> None:
        """Store chunks by their SHA-256. Existing ones are not uploaded again.

        A damaged one is repaired.
        """
        self.claims.claim(self.holder, chunks)
        list(self.pool.map(self._put_one, chunks.items()))

    def put_buffered(self, chunks: dict[str, bytes]) -> None:
        """Buffer the last chunks of files, and store those of many files together. Not thread-safe.

        Claiming them one by one was most of the time that a small file took.
        """
        self.buffer.update(chunks)
        if len(self.buffer) >= BATCH_CHUNKS or sum(map(len, self.buffer.values())) >= BATCH_BYTES:
            self.flush_buffer()

    def flush_buffer(self) -> None:
        if self.buffer:
            self.put(self.buffer)
            self.buffer.clear()

    def _put_one(self, chunk: tuple[str, bytes]) -> None:
        sha256, data = chunk
        uri = chunk_uri(self.folder_uri, sha256)
        if not self.store.has_content(uri, data):
            self.store.put_bytes(uri, data)


@contextmanager
def open_chunk_store(store: Store, claims: ChunkClaims, holder: str, folder_uri: str) -> Iterator[ChunkStore]:
    """Open a chunk store. When the block ends, every file that was closed is stored."""
    with ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="chunks") as pool:
        chunks = ChunkStore(store, claims, holder, folder_uri, pool)
        yield chunks
        chunks.flush_buffer()


class ChunkedFile:
    """A file that is being stored.

    A thread of the pool hashes and splits it, one piece behind the writer: both release the GIL, so that the records can be
    read meanwhile.
    """

    def __init__(self, chunks: ChunkStore, path: str) -> None:
        self._chunks = chunks
        self._path = path
        # Imported late: it loads numpy, which a server does not need to start.
        from recipes.storage.chunking import Chunker

        self._chunker = Chunker()
        self._digest = hashlib.sha256()
        self._batch: dict[str, bytes] = {}
        self._stored: list[Chunk] = []
        self._pending: Future[None] | None = None
        self.size = 0

    def write(self, data: bytes) -> None:
        """Write more bytes. Raises the error of an earlier write, if there was one."""
        self._await_pending()
        self.size += len(data)
        self._pending = self._chunks.pool.submit(self._process, data)

    def close(self) -> FileRecord:
        """Store the rest of the file, or buffer it for a later batch."""
        self._await_pending()
        for chunk in self._chunker.finish():
            self._add(chunk)
        self._chunks.put_buffered(self._batch)
        return FileRecord(path=self._path, sha256=self._digest.hexdigest(), size=self.size, chunks=tuple(self._stored))

    def _await_pending(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def _process(self, data: bytes) -> None:
        self._digest.update(data)
        for chunk in self._chunker.push(data):
            self._add(chunk)

    def _add(self, data: bytes) -> None:
        sha256 = hashlib.sha256(data).hexdigest()
        self._stored.append(Chunk(sha256=sha256, size=len(data)))
        self._batch[sha256] = data
        if sum(map(len, self._batch.values())) >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._batch:
            self._chunks.put(self._batch)
            self._batch = {}
