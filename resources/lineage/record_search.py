"""Records that say something: all versions are searched, what several have in common once, in flat memory."""

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
"""Chunks that are read while one is searched."""
WHOLE_FILE = "whole"
"""What stands before a file that was not cut into chunks."""


class Matches(BaseModel):
    """`records` counts the stored records in which the text stands, `size_bytes` what was searched."""

    match: str
    records: int
    size_bytes: int
    traces: list[Trace]


def trace_matches(tracer: Tracer, text: str, limit: int) -> Matches:
    """Trace the first `limit` different records that say `text`, and count all.

    Raises:
        HanzoError: 400 for no text.
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
    """Looks for a text in records. What was searched once, in whichever version, is not searched again."""

    store: Store
    text: str
    size: int = 0
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _has_line_end: dict[str, bool] = field(default_factory=dict)
    """Whether a line ends in a chunk, of those that were searched."""

    def lines(self, artifact: Artifact) -> Iterator[bytes]:
        """The records of an artifact that say the text, save those that were found before it in another."""
        for file in self.store.manifest(artifact).files:
            if not file.path.endswith(".jsonl"):
                continue
            if file.chunks:
                yield from self._matching_lines(self._new_lines(artifact, file))
            elif (WHOLE_FILE, file.sha256) not in self._seen:
                self._seen.add((WHOLE_FILE, file.sha256))
                yield from self._matching_lines(line_blocks(self.store.pieces(artifact.uri, file)))

    def _new_lines(self, artifact: Artifact, file: FileRecord) -> Iterator[bytes]:
        """Blocks of whole lines: those of chunks that were not searched yet behind the chunks before them.

        A line may be longer than a chunk. What stands before a chunk is therefore all since the last end of a line.
        """
        before = ""
        rest: list[bytes] | None = []  # of the line that ends in a later chunk; none where it was not read
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
        """What stands before a chunk of the line that ends in it or behind it."""
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
        """The lines of which a text, and not only a key, holds what is looked for."""
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
    """The pieces, cut anew so that each consists of whole lines. A line that does not end is left out."""
    rest: list[bytes] = []
    for piece in pieces:
        end = piece.rfind(b"\n") + 1
        if end:
            yield b"".join((*rest, piece[:end]))
            rest = []
        rest.append(piece[end:])
