"""Store files in chunks while they are read: each chunk once, however many versions have it."""

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
"""What is claimed together, and with `Chunker`'s buffer the memory of a file that is written."""


BATCH_CHUNKS = 500
"""The most that are claimed together: on SQLite nobody else writes meanwhile."""


UPLOAD_THREADS = 8
"""Threads: two of them at most hash and cut a file, the others have a chunk on its way to the store each."""


@dataclass(frozen=True)
class ChunkStore:
    """Puts chunks where those of the dataset at `folder_uri` lie, for one holder of `claims`."""

    store: Store
    claims: ChunkClaims
    holder: str
    folder_uri: str
    pool: ThreadPoolExecutor
    buffer: dict[str, bytes] = field(default_factory=dict)

    def put(self, chunks: dict[str, bytes]) -> None:
        """Store chunks by their SHA-256. Those that are there are not sent again; one that was damaged there is mended."""
        self.claims.claim(self.holder, chunks)
        list(self.pool.map(self._put_one, chunks.items()))

    def put_buffered(self, chunks: dict[str, bytes]) -> None:
        """Store what files end with, those of many files together: one by one, to claim them was most of what a small file
        took. Only one thread may.
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
    """Every file that was closed is in the store once this has ended."""
    with ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="chunks") as pool:
        chunks = ChunkStore(store, claims, holder, folder_uri, pool)
        yield chunks
        chunks.flush_buffer()


class ChunkedFile:
    """One file on its way into the store.

    It is hashed and cut by a thread of the pool, one piece behind: those leave Python's lock to whoever reads the records.
    """

    def __init__(self, chunks: ChunkStore, path: str) -> None:
        self._chunks = chunks
        self._path = path
        # It loads numpy, which a server need not load to start.
        from recipes.storage.chunking import Chunker

        self._chunker = Chunker()
        self._digest = hashlib.sha256()
        self._batch: dict[str, bytes] = {}
        self._stored: list[Chunk] = []
        self._pending: Future[None] | None = None
        self.size = 0

    def write(self, data: bytes) -> None:
        """Take more bytes. Raises what went wrong with those before."""
        self._await_pending()
        self.size += len(data)
        self._pending = self._chunks.pool.submit(self._process, data)

    def close(self) -> FileRecord:
        """Store what is left, or have it stored with what the next files end with."""
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
