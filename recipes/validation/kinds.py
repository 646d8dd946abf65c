"""The JSON type of each value in a column of a block."""

import sys
from collections.abc import Sequence
from typing import Any

MISSING = object()
"""Stands where a record does not have the column."""

KINDS: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
    object: "missing",
}

LARGEST = sys.float_info.max


def double(value: float) -> float:
    """The nearest double: JSON has integers beyond all of them."""
    return float(min(max(value, -LARGEST), LARGEST))


def column(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[Any], list[str]]:
    """The values of a column and their kinds."""
    values = [row.get(name, MISSING) for row in rows]
    return values, [KINDS[type(value)] for value in values]
