"""Search all versions for records with a text, in constant memory.

Chunks that versions share are searched once.
"""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
from pydantic import BaseModel

from recipes.records.fingerprint import iterate_strings
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, Chunk, FileRecord
from resources.errors import invalid
from resources.lineage.trace import Trace, Tracer

PREFETCH_CHUNKS = 4
"""Number of chunks that are read ahead."""
WHOLE_FILE = "whole"
"""Used as the preceding chunk for a file that is not stored in chunks."""


class Matches(BaseModel):
    """`records` counts the stored records that contain the text.

    `size_bytes` is the amount of data that was searched.
    """

    match: str
    records: int
    size_bytes: int
    traces: list[Trace]


def trace_matches(tracer: Tracer, text: str, limit: int) -> Matches:
    """Trace the first `limit` different records that contain `text`, and count all.

    Raises:
        HanzoError: 400 if `text` is empty.
    """
    if not text.strip():
        raise invalid("the text to match is empty: say what the records should contain")
    search = TextSearch(tracer.store, text)
    first: dict[bytes, None] = {}
    records = 0
    for artifact in tracer.versions:
        for line in search.lines(artifact):
            records += 1
            if len(first) < limit:
                first[line] = None
    traces = [tracer.trace(msgspec.json.decode(line)) for line in first]
    return Matches(match=text, records=records, size_bytes=search.size, traces=traces)


@dataclass
class TextSearch:
    """Searches records for a text. Data that several versions share is searched once."""

    store: Store
    text: str
    size: int = 0
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _has_line_end: dict[str, bool] = field(default_factory=dict)
    """Whether a line ends within a chunk, for the chunks that were searched."""

    def lines(self, artifact: Artifact) -> Iterator[bytes]:
        """Yield the records of an artifact that contain the text.

        Data that was searched in an earlier artifact is skipped.
        """
        for file in self.store.manifest(artifact).files:
            if not file.path.endswith(".jsonl"):
                continue
            if file.chunks:
                yield from self._matching_lines(self._new_lines(artifact, file))
            elif (WHOLE_FILE, file.sha256) not in self._seen:
                self._seen.add((WHOLE_FILE, file.sha256))
                yield from self._matching_lines(line_blocks(self.store.pieces(artifact.uri, file)))

    def _new_lines(self, artifact: Artifact, file: FileRecord) -> Iterator[bytes]:
        """Yield blocks of complete lines from chunks that were not searched yet.

        A chunk counts as searched only if it followed the same predecessor.

        A line may be longer than a chunk. The predecessor is therefore all data since the last line end.
        """
        before = ""
        rest: list[bytes] | None = []  # the start of a line that ends in a later chunk; None if it was not read
        waiting: dict[int, Future[bytes]] = {}
        with ThreadPoolExecutor(PREFETCH_CHUNKS) as pool:
            for place, chunk in enumerate(file.chunks):
                for later in range(place, min(place + PREFETCH_CHUNKS, len(file.chunks))):
                    if later not in waiting and file.chunks[later].sha256 not in self._has_line_end:
                        waiting[later] = pool.submit(self._chunk, artifact, file, file.chunks[later])
                future = waiting.pop(place, None)
                if (before, chunk.sha256) in self._seen:
                    rest = None
                else:
                    self._seen.add((before, chunk.sha256))
                    data = future.result() if future else self._chunk(artifact, file, chunk)
                    rest = self._line_start(artifact, file, place) if rest is None else rest
                    end = data.rfind(b"\n") + 1
                    self._has_line_end[chunk.sha256] = end > 0
                    if end:
                        yield b"".join((*rest, data[:end]))
                        rest = []
                    rest.append(data[end:])
                ends = self._has_line_end[chunk.sha256]
                before = chunk.sha256 if ends else hashlib.sha256((before + chunk.sha256).encode()).hexdigest()

    def _line_start(self, artifact: Artifact, file: FileRecord, place: int) -> list[bytes]:
        """Return the start, from earlier chunks, of the line that continues in a chunk."""
        found: list[bytes] = []
        while place:
            place -= 1
            _, newline, data = self._chunk(artifact, file, file.chunks[place]).rpartition(b"\n")
            found.insert(0, data)
            if newline:
                break
        return found

    def _chunk(self, artifact: Artifact, file: FileRecord, chunk: Chunk) -> bytes:
        return b"".join(self.store.pieces(artifact.uri, file.model_copy(update={"chunks": (chunk,)})))

    def _matching_lines(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the lines in which a value contains the text; a key does not count."""
        needle = msgspec.json.encode(self.text)[1:-1]
        for block in blocks:
            self.size += len(block)
            place = block.find(needle)
            while place >= 0:
                begin, end = block.rfind(b"\n", 0, place) + 1, block.index(b"\n", place)
                line = block[begin:end]
                if any(self.text in value for value in iterate_strings(msgspec.json.decode(line))):
                    yield line
                place = block.find(needle, end)


def line_blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Split the pieces into blocks of complete lines.

    A line without a line end is left out.
    """
    rest: list[bytes] = []
    for piece in pieces:
        end = piece.rfind(b"\n") + 1
        if end:
            yield b"".join((*rest, piece[:end]))
            rest = []
        rest.append(piece[end:])
