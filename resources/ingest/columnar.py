"""Parquet and Arrow files (IPC files and streams): rows as JSON objects, without a loss that nobody is told of.

What becomes of their values says `resources.ingest.column_values`.
"""

import struct
from collections.abc import Iterator
from io import SEEK_END
from typing import TYPE_CHECKING, Any, BinaryIO

from resources.ingest.arrow_sizes import IPC_FILE, unpacked_size
from resources.ingest.column_schema import COLUMNS
from resources.ingest.column_values import json_values, without_form
from resources.ingest.decompression_bomb import WORDS, is_swollen
from resources.ingest.magic_bytes import LONGEST_BEGINNING, another_format
from resources.ingest.parquet_sizes import least_size, rows_that_fit
from resources.ingest.problems import Problem, first_line

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS, BYTES = 512, 8 << 20
"""Rows that are in memory at once, and about how many bytes of them, where the file itself does not hold larger groups
together: as values of Python they take several times as much.
"""

BUFFER = 1 << 16
"""Bytes of a column that are read where a single row is wanted, and not all that a row group has of it."""
UNREADABLE = (OSError, MemoryError, UnicodeDecodeError, struct.error)
"""What the readers raise, beside exceptions of their own, of files whose lengths and names are none."""


def parquet_records(stream: BinaryIO) -> Iterator[dict[str, Any] | Problem]:
    import pyarrow as pa  # slow to import, and only these formats need it
    import pyarrow.parquet as pq

    stream.seek(0)
    if words := another_format(stream.read(LONGEST_BEGINNING), "parquet"):
        yield Problem(words)
        return
    try:
        file = pq.ParquetFile(stream)
        read_a_row_of_each(file.metadata, stream)
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        if is_swollen(sum(map(least_size, groups)), stream.seek(0, SEEK_END)):
            yield Problem(WORDS)
            return
        at_once = [rows_that_fit(group, stream, rows_within(group.total_byte_size, group.num_rows)) for group in groups]
        batches = (batch for index, rows in enumerate(at_once) for batch in file.iter_batches(rows, [index]))
        yield from rows_of(file.schema_arrow, batches)
    except (pa.ArrowException, *UNREADABLE) as error:
        yield Problem(f"is no parquet file that can be read ({said_by(error)})")


def read_a_row_of_each(metadata: "pq.FileMetaData", stream: BinaryIO) -> None:
    """Read the first row of each row group. Raises what the reader raises of columns whose footer contradicts itself: to ask
    for what the footer says of one of those was the end of the process.
    """
    import pyarrow.parquet as pq

    file = pq.ParquetFile(stream, metadata=metadata, buffer_size=BUFFER)
    for index in range(metadata.num_row_groups):
        next(file.iter_batches(1, [index]), None)


def arrow_records(stream: BinaryIO) -> Iterator[dict[str, Any] | Problem]:
    import pyarrow as pa

    stream.seek(0)
    if words := another_format(stream.read(LONGEST_BEGINNING), "arrow"):
        yield Problem(words)
        return
    try:
        if is_swollen(unpacked_size(stream), stream.seek(0, SEEK_END)):
            yield Problem(WORDS)
            return
        stream.seek(0)
        is_file = stream.read(len(IPC_FILE)) == IPC_FILE
        stream.seek(0)
        if is_file:
            file = pa.ipc.open_file(stream)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
            yield from rows_of(file.schema, whole(batches))
        else:
            reader = pa.ipc.open_stream(stream)
            yield from rows_of(reader.schema, whole(iter(reader)))
    except (pa.ArrowException, *UNREADABLE) as error:
        yield Problem(f"is no Arrow file that can be read ({said_by(error)})")


def whole(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    """Batches whose offsets lie within their buffers: nobody looks at those as a batch is read, and one flipped bit of a
    file was the end of the process.
    """
    for batch in batches:
        batch.validate(full=True)
        yield batch


def said_by(error: Exception) -> str:
    return "its messages end within their words" if isinstance(error, struct.error) else first_line(error)


def rows_within(size: int, rows: int) -> int:
    """How many of `rows` rows, that have `size` bytes together, are read at once."""
    return max(1, min(ROWS, BYTES * rows // max(size, 1)))


def is_text(type: "pa.DataType") -> bool:
    """Whether the values are texts or bytes of any length."""
    from pyarrow import types

    return bool(types.is_string(type) or types.is_large_string(type) or types.is_binary(type) or types.is_large_binary(type))


def size_of(column: "pa.Array") -> int:
    """Bytes of a column, about; of one with a dictionary, of what stands for its values."""
    from pyarrow import types

    if types.is_dictionary(column.type):
        if is_text(column.type.value_type):
            import pyarrow.compute as pc

            return int(pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0)
        return int(column.dictionary.nbytes * len(column) // max(len(column.dictionary), 1))
    return int(column.nbytes)


def rows_of(schema: "pa.Schema", batches: "Iterator[pa.RecordBatch]") -> Iterator[dict[str, Any] | Problem]:
    problems = list(bad_columns(schema))
    yield from problems
    if problems:
        return
    count = 0
    told: set[str] = set()
    for batch in batches:
        step = rows_within(sum(map(size_of, batch.columns)), batch.num_rows)
        for start in range(0, batch.num_rows, step):
            part = batch.slice(start, step)
            columns = {}
            for name, column in zip(schema.names, part.columns, strict=True):
                values, problem = json_values(name, column)
                columns[name] = values
                if problem and name not in told:
                    told.add(name)
                    yield Problem(problem)
            count += part.num_rows
            if not told:
                yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    if not count:
        yield Problem("is empty: a dataset needs at least one record")


def bad_columns(schema: "pa.Schema") -> Iterator[Problem]:
    if not schema.names:
        yield Problem("has no columns")
    if len(schema.names) > COLUMNS:
        yield Problem(f"has {len(schema.names)} columns: a dataset has at most {COLUMNS}")
        return
    for index, field in enumerate(schema):
        if field.name in schema.names[:index]:
            yield Problem(f"has two columns '{field.name}'")
        if reason := without_form(field.type):
            yield Problem(f"has a column '{field.name}' of type {field.type}, {reason}")
