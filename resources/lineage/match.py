"""Records that say something: all versions are searched, what several have in common once, in flat memory."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
from pydantic import BaseModel

from recipes.fingerprint import strings
from recipes.schema import Artifact, Chunk, FileRecord
from recipes.store import Store
from resources.errors import invalid
from resources.lineage.trace import Trace, Tracer

AHEAD = 4
"""Chunks that are read while one is searched."""


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
    search = Search(tracer.store, text)
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
class Search:
    """Looks for a text in records. What was searched once, in whichever version, is not searched again."""

    store: Store
    text: str
    size: int = 0
    _seen: set[tuple[str, str]] = field(default_factory=set)

    def lines(self, artifact: Artifact) -> Iterator[bytes]:
        """The records of an artifact that say the text, save those that were found before it in another."""
        for file in self.store.manifest(artifact).files:
            if not file.path.endswith(".jsonl"):
                continue
            if file.chunks:
                for start, stop in self._new_runs(file.chunks):
                    yield from self._in_lines(blocks(self._run(artifact, file, start, stop)))
            elif ("", file.sha256) not in self._seen:
                self._seen.add(("", file.sha256))
                yield from self._in_lines(blocks(self.store.pieces(artifact.uri, file)))

    def _new_runs(self, chunks: tuple[Chunk, ...]) -> Iterator[tuple[int, int]]:
        """Ranges of chunks that were not searched behind the chunk before them: a line may begin there."""
        before = ""
        new = []
        for chunk in chunks:
            new.append((before, chunk.sha256) not in self._seen)
            self._seen.add((before, chunk.sha256))
            before = chunk.sha256
        start = None
        for place, is_new in enumerate([*new, False]):
            if is_new and start is None:
                start = place
            elif not is_new and start is not None:
                yield start, place
                start = None

    def _run(self, artifact: Artifact, file: FileRecord, start: int, stop: int) -> Iterator[bytes]:
        """Chunks `start` to before `stop`, and before them the beginning of the line that ends in the first."""
        beginning = b""
        before = start
        while before and b"\n" not in beginning:
            before -= 1
            beginning = self._chunk(artifact, file, file.chunks[before]) + beginning
        yield beginning.rpartition(b"\n")[2]
        del beginning
        with ThreadPoolExecutor(AHEAD) as pool:
            waiting: deque[Future[bytes]] = deque()
            for chunk in file.chunks[start:stop]:
                waiting.append(pool.submit(self._chunk, artifact, file, chunk))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _chunk(self, artifact: Artifact, file: FileRecord, chunk: Chunk) -> bytes:
        return b"".join(self.store.pieces(artifact.uri, file.model_copy(update={"chunks": (chunk,)})))

    def _in_lines(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """The lines of which a text, and not only a key, holds what is looked for."""
        needle = msgspec.json.encode(self.text)[1:-1]
        for block in blocks:
            self.size += len(block)
            place = block.find(needle)
            while place >= 0:
                begin, end = block.rfind(b"\n", 0, place) + 1, block.index(b"\n", place)
                line = block[begin:end]
                if any(self.text in said for said in strings(msgspec.json.decode(line))):
                    yield line
                place = block.find(needle, end)


def blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces, cut anew so that each consists of whole lines. A line that does not end is left out."""
    rest: list[bytes] = []
    for piece in pieces:
        end = piece.rfind(b"\n") + 1
        if end:
            yield b"".join((*rest, piece[:end]))
            rest = []
        rest.append(piece[end:])
