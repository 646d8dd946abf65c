"""Stream the records of an artifact, chunk by chunk, from the store."""

import io
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from recipes.preparation.plan import Range
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.manifest import Artifact, Chunk, FileRecord

PREFETCH_CHUNKS = 4
"""Chunks of a range to read ahead; with their size, the memory of a worker."""
TRAILING_CHUNKS = 2
"""Chunks after a range that probably contain the end of its last line."""
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class LocalFile:
    """A verified local file."""

    path: Path

    def open(self, start: int, end: int) -> BinaryIO:
        """Open the file at byte `start`; the reader stops shortly after `end`."""
        file = self.path.open("rb")
        file.seek(start)
        return file


@dataclass(frozen=True)
class ChunkedFile:
    """A file in chunks, of which those of a range are listed.

    Only a very long line needs others. Listing all chunks with each range would be millions of chunks for each of 600,000
    ranges of a 10 TB file.
    """

    store: Store
    artifact: Artifact
    path: str
    chunks: tuple[Chunk, ...]
    first: int
    """Number of the first of `chunks`, which starts at byte `before`, out of `count`."""
    before: int
    count: int

    def open(self, start: int, end: int) -> BinaryIO:
        """Like `LocalFile.open`.

        Reading raises BrokenArtifact for a corrupt chunk.
        """
        return cast(BinaryIO, io.BufferedReader(ChunkStream(self._read_chunks(start, end)), BUFFER_BYTES))

    def _read_chunks(self, start: int, end: int) -> Iterator[bytes]:
        before = self.before
        pending: deque[tuple[int, Future[bytes]]] = deque()
        with ThreadPoolExecutor(PREFETCH_CHUNKS, thread_name_prefix="chunks") as pool:
            for chunk in chain(self.chunks, self._following_chunks()):
                if before + chunk.size > start:
                    # After `end`, fetch one chunk at a time on demand: it only contains the rest of the last line.
                    while pending and (len(pending) > PREFETCH_CHUNKS or before >= end):
                        yield next_chunk(pending)
                    pending.append((max(start - before, 0), pool.submit(self._chunk, chunk)))
                before += chunk.size
            while pending:
                yield next_chunk(pending)

    def _following_chunks(self) -> Iterator[Chunk]:
        """Yield the chunks after the listed ones."""
        if (known := self.first + len(self.chunks)) < self.count:
            (file,) = (file for file in self.store.manifest(self.artifact).files if file.path == self.path)
            yield from file.chunks[known:]

    def _chunk(self, chunk: Chunk) -> bytes:
        try:
            return self.store.chunk(self.artifact.uri, chunk)
        except FileNotFoundError as error:
            raise BrokenArtifact(f"a chunk of a file of {self.artifact.uri} is missing: {error}") from None


def next_chunk(pending: deque[tuple[int, Future[bytes]]]) -> bytes:
    """Return the first pending chunk without the bytes before the requested start."""
    skipped, data = pending.popleft()
    return data.result()[skipped:]


class ChunkStream(io.RawIOBase):
    """Presents an iterator of bytes as a stream."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._read_chunks = pieces
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._piece:
            if (piece := next(self._read_chunks, None)) is None:
                return 0
            self._piece = memoryview(piece)
        size = min(len(buffer), len(self._piece))
        buffer[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size


class Source:
    """The record files of an artifact."""

    def __init__(self, store: Store, artifact: Artifact, cache: Path) -> None:
        self._store, self._artifact, self._cache = store, artifact, cache
        found = (file for file in store.manifest(artifact).files if file.path.endswith(".jsonl"))
        self.files: dict[str, FileRecord] = {file.path: file for file in sorted(found, key=lambda file: file.path)}
        self._fetched: dict[str, LocalFile] = {}
        self._starts: dict[str, list[int]] = {}

    def open(self, path: str) -> BinaryIO:
        """Open a whole file."""
        size = self.files[path].size
        return self.range_file(Range(path, 0, size)).open(0, size)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of all files."""
        for path in self.files:
            with self.open(path) as file:
                yield from file

    def range_file(self, place: Range) -> LocalFile | ChunkedFile:
        """Return the file for reading a range.

        Raises BrokenArtifact if a whole file differs from its record.
        """
        file = self.files[place.file]
        if file.chunks:
            if file.path not in self._starts:
                self._starts[file.path] = [*accumulate((chunk.size for chunk in file.chunks), initial=0)]
            starts = self._starts[file.path]
            # One byte more, which shows whether a line starts at the range's start.
            first = max(bisect_right(starts, max(place.start - 1, 0)) - 1, 0)
            chunks = file.chunks[first : bisect_left(starts, place.end) + TRAILING_CHUNKS]
            return ChunkedFile(self._store, self._artifact, file.path, chunks, first, starts[first], len(file.chunks))
        self.fetch([file.path])
        return self._fetched[file.path]

    def fetch(self, paths: Iterable[str]) -> None:
        """Fetch files that are not in chunks.

        Fetch many at once: each call reads the whole manifest.
        """
        wanted = {path for path in paths if path not in self._fetched and not self.files[path].chunks}
        if wanted:
            folder = self._store.fetch(self._artifact, self._cache, only=wanted)
            self._fetched |= {path: LocalFile(folder / path) for path in wanted}
