"""The values of an Arrow column as JSON has them, without a loss that nobody is told of.

Numbers, texts, booleans, lists and structs are JSON's own. Decimals are texts with all their digits; dates, times and
timestamps are texts as RFC 3339 has them, durations as ISO 8601, down to microseconds; binary values are base64; a map is an
array of [key, value]; dictionaries are what they stand for. What has no such form is refused by the name of its column: NaN
and infinity, nanoseconds that are not whole microseconds, unions, intervals, extension types.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from resources.ingest.problems import first_error_line

if TYPE_CHECKING:
    import pyarrow as pa


def unsupported_reason(type: "pa.DataType") -> str | None:
    """Why a type has no form in JSON; None where it has."""
    from pyarrow import types

    if types.is_dictionary(type) or types.is_nested(type):
        if types.is_union(type):
            return "which has no form in JSON: write a column for each of its types"
        children = [type.value_type] if types.is_dictionary(type) else [type.field(i).type for i in range(type.num_fields)]
        return next(filter(None, map(unsupported_reason, children)), None)
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


def json_values(name: str, column: "pa.Array") -> tuple[list[Any], str | None]:
    """The values of a column as JSON has them, or no values and what is wrong."""
    import pyarrow as pa

    if not is_finite(column):
        return [], f"has NaN or infinity in column '{name}', which JSON has not: write null, or a text"
    try:
        target = to_microseconds(column.type)
        exact = column if target == column.type else column.cast(target)
        values: list[Any] = msgspec.to_builtins(exact.to_pylist())
    except pa.ArrowInvalid:
        return [], f"has nanoseconds in column '{name}', and only microseconds have a form: round them, or write a text"
    except (ValueError, OverflowError, TypeError, LookupError) as error:  # no zone of that name is known
        return [], f"has a value in column '{name}' that has no form in JSON ({first_error_line(error)})"
    return values, None


def to_microseconds(type: "pa.DataType") -> "pa.DataType":
    """The type with nanoseconds as microseconds, within others too."""
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
    """Whether every floating point value is, in lists, structs and maps too."""
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
