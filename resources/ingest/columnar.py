"""Parquet and Arrow files (IPC files and streams): rows as JSON objects, without a loss that nobody is told of.

What becomes of their values says `resources.ingest.column_values`.
"""

import struct
from collections.abc import Iterator
from io import SEEK_END
from typing import TYPE_CHECKING, Any, BinaryIO

from resources.ingest.arrow_sizes import IPC_MAGIC, uncompressed_size
from resources.ingest.column_schema import MAX_COLUMNS
from resources.ingest.column_values import json_values, unsupported_reason
from resources.ingest.decompression_bomb import EXPANSION_MESSAGE, exceeds_expansion_limit
from resources.ingest.magic_bytes import MAX_MAGIC_BYTES, detect_other_format
from resources.ingest.parquet_sizes import max_batch_rows, min_group_size
from resources.ingest.problems import Problem, first_error_line

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH_ROWS, BATCH_BYTES = 512, 8 << 20
"""Rows that are in memory at once, and about how many bytes of them, where the file itself does not hold larger groups
together: as values of Python they take several times as much.
"""

READ_BUFFER_BYTES = 1 << 16
"""Bytes of a column that are read where a single row is wanted, and not all that a row group has of it."""
READ_ERRORS = (OSError, MemoryError, UnicodeDecodeError, struct.error)
"""What the readers raise, beside exceptions of their own, of files whose lengths and names are none."""


def read_parquet(stream: BinaryIO) -> Iterator[dict[str, Any] | Problem]:
    import pyarrow as pa  # slow to import, and only these formats need it
    import pyarrow.parquet as pq

    stream.seek(0)
    if words := detect_other_format(stream.read(MAX_MAGIC_BYTES), "parquet"):
        yield Problem(words)
        return
    try:
        file = pq.ParquetFile(stream)
        check_row_groups(file.metadata, stream)
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        if exceeds_expansion_limit(sum(map(min_group_size, groups)), stream.seek(0, SEEK_END)):
            yield Problem(EXPANSION_MESSAGE)
            return
        batch_sizes = [
            max_batch_rows(group, stream, batch_row_count(group.total_byte_size, group.num_rows)) for group in groups
        ]
        batches = (batch for index, rows in enumerate(batch_sizes) for batch in file.iter_batches(rows, [index]))
        yield from read_rows(file.schema_arrow, batches)
    except (pa.ArrowException, *READ_ERRORS) as error:
        yield Problem(f"is no parquet file that can be read ({describe_error(error)})")


def check_row_groups(metadata: "pq.FileMetaData", stream: BinaryIO) -> None:
    """Read the first row of each row group. Raises what the reader raises of columns whose footer contradicts itself: to ask
    for what the footer says of one of those was the end of the process.
    """
    import pyarrow.parquet as pq

    file = pq.ParquetFile(stream, metadata=metadata, buffer_size=READ_BUFFER_BYTES)
    for index in range(metadata.num_row_groups):
        next(file.iter_batches(1, [index]), None)


def read_arrow(stream: BinaryIO) -> Iterator[dict[str, Any] | Problem]:
    import pyarrow as pa

    stream.seek(0)
    if words := detect_other_format(stream.read(MAX_MAGIC_BYTES), "arrow"):
        yield Problem(words)
        return
    try:
        if exceeds_expansion_limit(uncompressed_size(stream), stream.seek(0, SEEK_END)):
            yield Problem(EXPANSION_MESSAGE)
            return
        stream.seek(0)
        is_file = stream.read(len(IPC_MAGIC)) == IPC_MAGIC
        stream.seek(0)
        if is_file:
            file = pa.ipc.open_file(stream)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
            yield from read_rows(file.schema, validated_batches(batches))
        else:
            reader = pa.ipc.open_stream(stream)
            yield from read_rows(reader.schema, validated_batches(iter(reader)))
    except (pa.ArrowException, *READ_ERRORS) as error:
        yield Problem(f"is no Arrow file that can be read ({describe_error(error)})")


def validated_batches(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    """Batches whose offsets lie within their buffers: nobody looks at those as a batch is read, and one flipped bit of a
    file was the end of the process.
    """
    for batch in batches:
        batch.validate(full=True)
        yield batch


def describe_error(error: Exception) -> str:
    return "its messages end within their words" if isinstance(error, struct.error) else first_error_line(error)


def batch_row_count(size: int, rows: int) -> int:
    """How many of `rows` rows, that have `size` bytes together, are read at once."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def is_text(type: "pa.DataType") -> bool:
    """Whether the values are texts or bytes of any length."""
    from pyarrow import types

    return bool(types.is_string(type) or types.is_large_string(type) or types.is_binary(type) or types.is_large_binary(type))


def column_size(column: "pa.Array") -> int:
    """Bytes of a column, about; of one with a dictionary, of what stands for its values."""
    from pyarrow import types

    if types.is_dictionary(column.type):
        if is_text(column.type.value_type):
            import pyarrow.compute as pc

            return int(pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0)
        return int(column.dictionary.nbytes * len(column) // max(len(column.dictionary), 1))
    return int(column.nbytes)


def read_rows(schema: "pa.Schema", batches: "Iterator[pa.RecordBatch]") -> Iterator[dict[str, Any] | Problem]:
    problems = list(find_column_problems(schema))
    yield from problems
    if problems:
        return
    count = 0
    reported_columns: set[str] = set()
    for batch in batches:
        step = batch_row_count(sum(map(column_size, batch.columns)), batch.num_rows)
        for start in range(0, batch.num_rows, step):
            part = batch.slice(start, step)
            columns = {}
            for name, column in zip(schema.names, part.columns, strict=True):
                values, problem = json_values(name, column)
                columns[name] = values
                if problem and name not in reported_columns:
                    reported_columns.add(name)
                    yield Problem(problem)
            count += part.num_rows
            if not reported_columns:
                yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    if not count:
        yield Problem("is empty: a dataset needs at least one record")


def find_column_problems(schema: "pa.Schema") -> Iterator[Problem]:
    if not schema.names:
        yield Problem("has no columns")
    if len(schema.names) > MAX_COLUMNS:
        yield Problem(f"has {len(schema.names)} columns: a dataset has at most {MAX_COLUMNS}")
        return
    for index, field in enumerate(schema):
        if field.name in schema.names[:index]:
            yield Problem(f"has two columns '{field.name}'")
        if reason := unsupported_reason(field.type):
            yield Problem(f"has a column '{field.name}' of type {field.type}, {reason}")
