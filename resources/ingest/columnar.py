"""Read Parquet and Arrow files as JSON rows without loss."""

import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import SEEK_END
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from resources.ingest.column_schema import MAX_COLUMNS
from resources.ingest.decompression_bomb import EXPANSION_MESSAGE, exceeds_expansion_limit
from resources.ingest.json_lines import parse_value
from resources.ingest.magic_bytes import MAX_MAGIC_BYTES, detect_other_format
from resources.ingest.memory_sizes import IPC_MAGIC, max_batch_rows, min_group_size, uncompressed_size
from resources.ingest.problems import EMPTY, Problem, first_error_line

# Converts Arrow columns to JSON values without silent loss.
#
# Numbers, texts, booleans, lists and structs have JSON equivalents. Decimals become texts with all their digits; dates,
# times and timestamps become texts in RFC 3339, durations in ISO 8601, down to microseconds; binary values become base64; a
# map becomes an array of [key, value]; dictionaries are replaced by their values; JSON is parsed, and a UUID becomes a text.
# Anything else is refused with the name of its column: NaN and infinity, nanoseconds that are not whole microseconds,
# unions, intervals, other extension types.
#
# Within a struct, null means that the key is absent, because all structs of a column have the same keys. In the columns of a
# conversation, a map with text keys becomes an object, like the arguments of a call.

if TYPE_CHECKING:
    import pyarrow as pa


def unsupported_reason(type: "pa.DataType") -> str | None:
    """Return why a type cannot be represented in JSON, or None if it can."""
    from pyarrow import types

    if types.is_dictionary(type) or types.is_nested(type):
        if types.is_union(type):
            return "which has no form in JSON: write a column for each of its types"
        children = [type.value_type] if types.is_dictionary(type) else [type.field(i).type for i in range(type.num_fields)]
        return next(filter(None, map(unsupported_reason, children)), None)
    if extension_name(type) in (JSON_EXTENSION, UUID_EXTENSION):
        return None
    known: tuple[Callable[[Any], bool], ...] = (
        types.is_null,
        types.is_boolean,
        types.is_integer,
        types.is_floating,
        types.is_decimal,
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_binary,
        types.is_large_binary,
        types.is_fixed_size_binary,
        types.is_binary_view,
        types.is_date,
        types.is_time,
        types.is_timestamp,
        types.is_duration,
    )
    return None if any(is_kind(type) for is_kind in known) else "which has no form in JSON: write it as a text"


JSON_EXTENSION, UUID_EXTENSION = "arrow.json", "arrow.uuid"
CONVERSATION_COLUMNS = ("messages", "tools")
Convert = Callable[[Any], Any]


def extension_name(type: "pa.DataType") -> str | None:
    import pyarrow as pa

    return str(type.extension_name) if isinstance(type, pa.BaseExtensionType) else None


def make_converter(type: "pa.DataType", *, is_conversation: bool) -> Convert | None:
    """Return a function that converts Python values to JSON values.

    Returns None if no conversion is needed.

    The function raises ValueError: a text that should be JSON is not.
    """
    from pyarrow import types

    if extension_name(type) == JSON_EXTENSION:
        return parse_json_text
    if types.is_dictionary(type):
        return make_converter(type.value_type, is_conversation=is_conversation)
    if types.is_struct(type):
        fields = {field.name: make_converter(field.type, is_conversation=is_conversation) for field in type.fields}
        return partial(convert_struct, fields)
    if types.is_map(type):
        is_object = is_conversation and is_text(type.key_type)
        return partial(convert_map, make_converter(type.item_type, is_conversation=is_conversation), is_object)
    if types.is_nested(type):
        item = make_converter(type.value_type, is_conversation=is_conversation)
        return None if item is None else partial(convert_list, item)
    return None


def convert_struct(fields: Mapping[str, Convert | None], value: Any) -> Any:
    if value is None:
        return None
    found = {}
    for key, held in value.items():
        if held is not None:
            convert = fields[key]
            found[key] = held if convert is None else convert(held)
    return found


def convert_map(item: Convert | None, is_object: bool, value: Any) -> Any:
    if value is None:
        return None
    pairs = [[key, held if item is None else item(held)] for key, held in value]
    return dict(pairs) if is_object else pairs


def convert_list(item: Convert, value: Any) -> Any:
    return None if value is None else [item(held) for held in value]


def parse_json_text(text: str | None) -> Any:
    """Parse a text as JSON. Raises ValueError: it is not JSON, or repeats a key."""
    if text is None:
        return None
    found = parse_value(text.encode())
    if isinstance(found, Problem):
        raise ValueError(found.reason)
    return found


def json_values(name: str, column: "pa.Array") -> tuple[list[Any], str | None]:
    """Return the values of a column as JSON, or no values and the problem."""
    import pyarrow as pa

    if not is_finite(column):
        return [], f"has NaN or infinity in column '{name}', which JSON has not: write null, or a text"
    try:
        target = to_microseconds(column.type)
        exact = column if target == column.type else column.cast(target)
        values: list[Any] = msgspec.to_builtins(exact.to_pylist())
        convert = make_converter(column.type, is_conversation=name in CONVERSATION_COLUMNS)
        if convert is not None:
            values = [convert(value) for value in values]
    except pa.ArrowInvalid:
        return [], f"has nanoseconds in column '{name}', and only microseconds have a form: round them, or write a text"
    except (ValueError, OverflowError, TypeError, LookupError) as error:  # such as an unknown time zone
        return [], f"has a value in column '{name}' that has no form in JSON ({first_error_line(error)})"
    return values, None


def to_microseconds(type: "pa.DataType") -> "pa.DataType":
    """Return the type with microseconds instead of nanoseconds, also within nested types."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_timestamp(type) and type.unit == "ns":
        return pa.timestamp("us", type.tz)
    if types.is_time64(type) and type.unit == "ns":
        return pa.time64("us")
    if types.is_duration(type) and type.unit == "ns":
        return pa.duration("us")
    if types.is_dictionary(type):
        exact = to_microseconds(type.value_type)
        return type if exact == type.value_type else exact
    if types.is_map(type):
        return pa.map_(type.key_field.with_type(to_microseconds(type.key_type)), to_microseconds(type.item_type))
    if types.is_fixed_size_list(type):
        return pa.list_(type.value_field.with_type(to_microseconds(type.value_type)), type.list_size)
    if types.is_struct(type):
        return pa.struct([type.field(i).with_type(to_microseconds(type.field(i).type)) for i in range(type.num_fields)])
    if types.is_list(type):
        return pa.list_(type.value_field.with_type(to_microseconds(type.value_type)))
    if types.is_large_list(type):
        return pa.large_list(type.value_field.with_type(to_microseconds(type.value_type)))
    return type


def is_finite(column: "pa.Array") -> bool:
    """Return whether every floating-point value is finite, including those in lists, structs and maps."""
    import pyarrow.compute as pc
    from pyarrow import types

    type = column.type
    if types.is_floating(type):
        return pc.all(pc.is_finite(column)).as_py() is not False
    if types.is_dictionary(type):
        return is_finite(column.dictionary)
    if types.is_struct(type):
        return all(is_finite(child) for child in column.flatten())
    if types.is_map(type):
        return is_finite(column.keys) and is_finite(column.items)
    if types.is_nested(type):
        return is_finite(column.flatten())
    return True


if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH_ROWS, BATCH_BYTES = 512, 8 << 20
"""Maximum number of rows in memory, and roughly of their bytes, unless the file itself has larger groups.

As Python values they take several times as much memory.
"""

READ_BUFFER_BYTES = 1 << 16
"""Bytes of a column that are read to get a single row, instead of the whole row group."""
READ_ERRORS = (OSError, MemoryError, UnicodeDecodeError, struct.error)
"""Errors of the readers, in addition to their own exceptions, for files with invalid lengths and names."""


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
    """Read the first row of each row group.

    Raises the reader's error if the footer contradicts the data. Without this check, using the footer's values crashed the
    process.
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
    """Yield batches after checking that their offsets are within their buffers.

    The reader does not check this, and one flipped bit in a file crashed the process.
    """
    for batch in batches:
        batch.validate(full=True)
        yield batch


def describe_error(error: Exception) -> str:
    return "its messages end within their words" if isinstance(error, struct.error) else first_error_line(error)


def batch_row_count(size: int, rows: int) -> int:
    """Return how many of `rows` rows with `size` bytes in total are read at once."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def is_text(type: "pa.DataType") -> bool:
    """Return whether the values are texts or bytes of variable length."""
    from pyarrow import types

    return bool(types.is_string(type) or types.is_large_string(type) or types.is_binary(type) or types.is_large_binary(type))


def column_size(column: "pa.Array") -> int:
    """Return the approximate bytes of a column.

    For a dictionary column, those of the decoded values.
    """
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
        yield EMPTY


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
