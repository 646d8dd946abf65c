"""What is in the files of a dataset: records are checked while they and the files are stored, in one pass of flat memory.

Only CSV is looked through before that: what type a column has, its last value in the last file may tell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipes.contracts.dataset_formats import Format
from recipes.storage.manifest import FileRecord
from resources.ingest.column_schema import TooManyColumns
from resources.ingest.column_types import column_types
from resources.ingest.formats import records_of
from resources.ingest.problems import CHANGED, Problem, Problems
from resources.ingest.raw_file import Damaged, Recorded
from resources.ingest.records import RecordsWriter
from resources.ingest.source_files import SourceFile
from resources.object_store.chunk_upload import ChunkedFile, ChunkStore


@dataclass(frozen=True)
class Content:
    """What was read and stored of the files."""

    source: tuple[FileRecord, ...]
    records: tuple[FileRecord, ...]
    index: FileRecord
    sha256: str
    num_records: int
    schema: Mapping[str, str]
    counts: Mapping[str, Mapping[str, int]]


def read_all(files: Sequence[SourceFile], format: Format, chunks: ChunkStore) -> Content:
    """Check and store all files. Raises on bad records, naming the first few and how many there are."""
    problems = Problems()
    states = [file.state() for file in files]
    kinds = column_types(files, problems) if format is Format.CSV else {}
    if problems.count:
        raise problems.refusal()
    records = RecordsWriter(chunks)
    source = []
    for file, state in zip(files, states, strict=True):
        raw = ChunkedFile(chunks, file.path)

        def keep(data: bytes, raw: ChunkedFile = raw) -> None:
            if not problems.count:  # what will be refused need not be stored
                raw.write(data)

        with file.open() as stream:
            recorded = Recorded(stream, keep)
            try:
                for number, item in enumerate(records_of(recorded, format, kinds), start=1):
                    if isinstance(item, Problem):
                        problems.add(file.name, item)
                    elif not problems.count:
                        try:
                            records.add(*item)
                        except TooManyColumns as problem:
                            problems.add(file.name, Problem(str(problem), f"record {number}"))
            except Damaged as damage:
                problems.add(file.name, Problem(str(damage)))
            recorded.to_the_end()
        # What is stored as its source would be other bytes than those that the records were read from.
        if not problems.count and file.state() != state:
            problems.add(file.name, CHANGED)
        if not problems.count:
            source.append(raw.close())
    if problems.count:
        raise problems.refusal()
    written, index, sha256 = records.close()
    schema = records.schema
    return Content(tuple(source), written, index, sha256, schema.records, schema.schema(), schema.counts())
