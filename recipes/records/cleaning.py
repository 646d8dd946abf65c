"""Fill missing values of a record's columns, and reject outliers."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from recipes.contracts.parameters import Bounds, CleanParameters, is_missing


class UncleanRecord(ValueError):
    """A record that does not go on: `reason` is one of a few."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def clean_record(row: dict[str, Any], wanted: CleanParameters, filled: Counter[str]) -> dict[str, Any]:
    """The record with the values that it lacks; itself where it lacks none. They are counted in `filled`, by column.

    Raises:
        Unclean: it has no value where every record must have one, or a number that is an outlier.
    """
    for column in wanted.required:
        if is_missing(row.get(column)):
            raise UncleanRecord("missing value", f"'{column}' is missing")
    lacking = {column: value for column, value in wanted.fill.items() if is_missing(row.get(column))}
    check_outliers(row, wanted.within)
    filled.update(lacking.keys())
    return row | lacking if lacking else row


def check_outliers(row: Mapping[str, Any], within: Mapping[str, Bounds]) -> None:
    """A value that is missing is none: `required` is what says that it may not be."""
    for column, bounds in within.items():
        value = row.get(column)
        if is_missing(value):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UncleanRecord("outlier", f"'{column}' is no number")
        if bounds.min is not None and value < bounds.min:
            raise UncleanRecord("outlier", f"'{column}' is below {bounds.min:g}")
        if bounds.max is not None and value > bounds.max:
            raise UncleanRecord("outlier", f"'{column}' is above {bounds.max:g}")
