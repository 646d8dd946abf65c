"""Check all records of raw files and store them in one streaming pass."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from recipes.contracts.dataset_formats import Format, partition_columns
from recipes.records.conversation import find_unread_keys
from recipes.records.fingerprint import encode_stored_line, fingerprint_record
from recipes.records.record_index import RECORDS, SegmentBuilder, index_file_name
from recipes.storage.manifest import Chunk, FileRecord
from resources.ingest.column_schema import MAX_COLUMNS, SchemaCounter, TooManyColumns
from resources.ingest.csv_records import Kind, join_kinds, read_csv_kinds
from resources.ingest.formats import Item, read_records
from resources.ingest.problems import CHANGED_WHILE_READ, EMPTY, Problem, Problems
from resources.ingest.raw_file import DamagedFile, TeeStream, UnclosedStream, decompress
from resources.ingest.source_files import SourceFile
from resources.object_store.chunk_upload import ChunkedFile, ChunkStore

# The index of records (`recipes.records.record_index`), stored together with the records.


class RecordIndexFile:
    """A file whose chunks are index segments.

    Segments that versions share are stored once, and claimed like all chunks.
    """

    def __init__(self, chunks: ChunkStore) -> None:
        self._chunks = chunks
        self._segments = SegmentBuilder()
        self._digest = hashlib.sha256()
        self._stored: list[Chunk] = []

    def add(self, row: Mapping[str, Any], line: bytes) -> None:
        found = fingerprint_record(row, line)
        if segment := self._segments.add(found.text, found.record):
            self._store(segment)

    def close(self) -> FileRecord:
        if segment := self._segments.finish():
            self._store(segment)
        size = sum(chunk.size for chunk in self._stored)
        return FileRecord(
            path=index_file_name(RECORDS), sha256=self._digest.hexdigest(), size=size, chunks=tuple(self._stored)
        )

    def _store(self, segment: bytes) -> None:
        sha256 = hashlib.sha256(segment).hexdigest()
        self._digest.update(segment)
        self._chunks.put({sha256: segment})
        self._stored.append(Chunk(sha256=sha256, size=len(segment)))


# Records are stored in one form: canonical JSON lines, in files that several readers can share.
#
# A line is JSON with sorted keys, no spaces, UTF-8, the shortest form of each number, and a final newline. Equal records are
# equal bytes, so the hash of all lines identifies a dataset's content, whichever files and format they came in. Only inside
# the arguments of tool calls and the parameters of tools, keys keep the file's order: models read them in this order, and so
# records with another order are different.

MAX_FILE_BYTES = 256 << 20
"""A file of records ends with the record that reaches this size."""
FLUSH_BYTES = 1 << 20


class RecordWriter:
    def __init__(self, chunks: ChunkStore) -> None:
        self._chunks = chunks
        self._file: ChunkedFile | None = None
        self._lines: list[bytes] = []
        self._length = 0
        self._written: list[FileRecord] = []
        self._index = RecordIndexFile(chunks)
        self.schema = SchemaCounter()
        self.unread: Counter[str] = Counter()

    def add(self, row: dict[str, Any], line: bytes) -> None:
        """Write a record with its stored line."""
        self.schema.count(row)
        self.unread.update(find_unread_keys(row))
        self._index.add(row, line)
        self._lines.append(line)
        self._length += len(line) + 1
        if self._length >= FLUSH_BYTES:
            self._flush()

    def close(self) -> tuple[tuple[FileRecord, ...], FileRecord, str]:
        """Return the stored files, their index, and the hash of their content.

        The hash is the SHA-256 of the only file, or of the hashes of all files; where files are split depends only on the
        lines.
        """
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
        if self._file.size >= MAX_FILE_BYTES:
            self._end_file()

    def _end_file(self) -> None:
        if self._file is not None:
            self._written.append(self._file.close())
            self._file = None


# The types of CSV columns over all files of a dataset, determined before the first record is written.
#
# With separate types per file, a numeric column became an integer column in a file whose values were all whole, and the same
# rows split into other files were different content.


def infer_column_types(files: Sequence[SourceFile], problems: Problems, empty: set[str]) -> Mapping[str, Kind]:
    """Return the type of each column.

    Problems are added to `problems`, files without a record to `empty`.
    """
    found: dict[str, Kind] = {}
    for file in files:
        report = partial(report_problem, file, problems, empty)
        with file.open() as stream:
            try:
                kinds = read_csv_kinds(decompress(UnclosedStream(stream)), report)
            except DamagedFile as damage:
                problems.add(file.name, Problem(str(damage)))
                continue
        for name, kind in kinds.items():
            found[name] = join_kinds(found.get(name, Kind.UNKNOWN), kind)
        if len(found) > MAX_COLUMNS:
            problems.add(
                file.name, Problem(f"has a column '{name[:100]}' too many: all files have at most {MAX_COLUMNS}", "line 1")
            )
            break
    return found


# Records are checked while they and the files are stored, in one pass with constant memory.
#
# Only CSV files are read once before that: the type of a column may depend on the last value in the last file.


@dataclass(frozen=True)
class Content:
    """What was read from the files and stored.

    `empty` are the paths of files without a record; `unread` counts the records that have a key inside messages or tools
    which no model reads.
    """

    source: tuple[FileRecord, ...]
    records: tuple[FileRecord, ...]
    index: FileRecord
    sha256: str
    num_records: int
    schema: Mapping[str, str]
    counts: Mapping[str, Mapping[str, int]]
    empty: tuple[str, ...] = ()
    unread: Mapping[str, int] = field(default_factory=dict)


def report_problem(file: SourceFile, problems: Problems, empty: set[str], problem: Problem) -> None:
    """Record a problem.

    A file without a record is not a problem as long as another file has one.
    """
    if problem is EMPTY:
        empty.add(file.path)
    else:
        problems.add(file.name, problem)


def check_and_store(files: Sequence[SourceFile], format: Format, chunks: ChunkStore) -> Content:
    """Check and store all files.

    Raises:
        HanzoError: bad records, of which the message names the first few.
    """
    problems, empty = Problems(), set[str]()
    states = [file.state() for file in files]
    kinds = infer_column_types(files, problems, empty) if format is Format.CSV else {}
    if problems.count:
        raise problems.refusal()
    records = RecordWriter(chunks)
    source = []
    for file, state in zip(files, states, strict=True):
        raw = ChunkedFile(chunks, file.path)

        def keep(data: bytes, raw: ChunkedFile = raw) -> None:
            if not problems.count:  # no need to store what will be refused
                raw.write(data)

        partition = partition_columns(file.path)
        with file.open() as stream:
            recorded = TeeStream(stream, keep)
            items = iter(()) if file.path in empty else read_part(recorded, format, kinds, is_only=len(files) == 1)
            try:
                for number, item in enumerate(items, start=1):
                    if isinstance(item, Problem):
                        report_problem(file, problems, empty, item)
                    elif not problems.count:
                        try:
                            records.add(*(add_partition(item, partition) if partition else item))
                        except (TooManyColumns, PartitionConflict) as problem:
                            problems.add(file.name, Problem(str(problem), f"record {number}"))
            except DamagedFile as damage:
                problems.add(file.name, Problem(str(damage)))
            recorded.drain()
        # Otherwise the stored source could differ from the bytes from which the records were read.
        if not problems.count and file.state() != state:
            problems.add(file.name, CHANGED_WHILE_READ)
        if not problems.count:
            source.append(raw.close())
    if len(empty) == len(files):
        for file in files:
            problems.add(file.name, EMPTY)
    if problems.count:
        raise problems.refusal()
    written, index, sha256 = records.close()
    schema = records.schema
    return Content(
        source=tuple(source),
        records=written,
        index=index,
        sha256=sha256,
        num_records=schema.records,
        schema=schema.schema(),
        counts=schema.counts(),
        empty=tuple(sorted(empty)),
        unread=dict(records.unread),
    )


def read_part(file: TeeStream, format: Format, kinds: Mapping[str, Kind], *, is_only: bool) -> Iterator[Item]:
    """Yield the records of a file.

    If it is one of several and has no bytes, it is empty in every format.
    """
    if not is_only and file.is_empty():
        yield EMPTY
    else:
        yield from read_records(file, format, kinds)


class PartitionConflict(Exception):
    """A record has another value than its folder's name states."""


def add_partition(item: tuple[dict[str, Any], bytes], partition: Mapping[str, str | None]) -> tuple[dict[str, Any], bytes]:
    """Return a record with the columns from its file's folders. Raises PartitionConflict."""
    row, _ = item
    for key, value in partition.items():
        if row.get(key, value) != value and str(row[key]) != value:
            raise PartitionConflict(f"has another '{key}' than its folder, '{key}={value}': rename the column or the folder")
    whole = {**partition, **row}
    return whole, encode_stored_line(whole)
