"""Clean records and compute features from columns, identically in training and serving."""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.parameters import Bounds, CleanParameters, FeatureParameters, is_missing


class UncleanRecord(ValueError):
    """A rejected record; `reason` is one of a few categories."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def clean_record(row: dict[str, Any], wanted: CleanParameters, filled: Counter[str]) -> dict[str, Any]:
    """Fill missing values of a record, counted by column in `filled`.

    Returns the same object if none is missing.

    Raises:
        UncleanRecord: a required value is missing, or a number is an outlier.
    """
    for column in wanted.required:
        if is_missing(row.get(column)):
            raise UncleanRecord("missing value", f"'{column}' is missing")
    lacking = {column: value for column, value in wanted.fill.items() if is_missing(row.get(column))}
    check_outliers(row, wanted.within)
    filled.update(lacking.keys())
    return row | lacking if lacking else row


def check_outliers(row: Mapping[str, Any], within: Mapping[str, Bounds]) -> None:
    """Check numbers against bounds.

    A missing value is no outlier; `required` rejects those.
    """
    for column, bounds in within.items():
        value = row.get(column)
        if is_missing(value):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UncleanRecord("outlier", f"'{column}' is not a number")
        if bounds.min is not None and value < bounds.min:
            raise UncleanRecord("outlier", f"'{column}' is below {bounds.min:g}")
        if bounds.max is not None and value > bounds.max:
            raise UncleanRecord("outlier", f"'{column}' is above {bounds.max:g}")


# Features of a record as numbers. The only implementation, for preparation and serving.
#
# Fitted parameters are a `FeatureState`, stored in a version's `features.json`. A category that was not fitted is 0 in all
# one-hot columns and -1 as an ordinal. A missing number stays null, unless `clean.fill` replaces it. An entity without
# records has count 0 and null for other aggregates.

STATE_FILE, ONLINE_FILE, ONLINE_INDEX_FILE = "features.json", "online.jsonl", "online.index"
"""The files of a version's features; the last two are a table of `recipes.records.key_index`, only present with a key."""
FEATURES_COLUMN = "features"
"""Column of a prepared record that holds its features."""
MAX_NUMBER = sys.float_info.max

NUMBER_TEXT = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*", re.ASCII)
"""A number in text form."""

Features = dict[str, float | int | None]


class Scale(FrozenModel):
    """Scaling to (number - shift) / unit.

    0 if all fitted numbers were equal, which have unit 0.
    """

    shift: float
    unit: float

    def scale(self, number: float) -> float:
        if not self.unit:
            return 0.0
        return max(-MAX_NUMBER, min(MAX_NUMBER, (number - self.shift) / self.unit))


class FeatureState(FrozenModel):
    """Feature definitions and fitted parameters of a version.

    `clean` only covers the columns of features.
    """

    features: FeatureParameters
    clean: CleanParameters | None
    categories: dict[str, tuple[str, ...]]
    scales: dict[str, Scale]


def compute_features(state: FeatureState, row: Mapping[str, Any], aggregates: Mapping[str, Any] | None) -> Features:
    """Compute the features of a row, in their defined order.

    Args:
        aggregates: aggregates of the row's key by feature name; None for an unknown key.

    Raises:
        UncleanRecord: a value is neither a number nor a category where one is needed.
    """
    made: Features = {}
    for column, spec in state.features.columns.items():
        value = row.get(column)
        if spec.normalize is not None:
            number = parse_number(value, column)
            made[column] = None if number is None else state.scales[column].scale(number)
            continue
        known, category = state.categories[column], parse_category(value, column)
        if spec.encode == "ordinal":
            made[column] = known.index(category) if category in known else -1
        else:
            made.update({one_hot_column(column, each): int(each == category) for each in known})
    for name, (_, function) in state.features.aggregates.items():
        made[name] = aggregates[name] if aggregates is not None else 0 if function == "count" else None
    return made


def serve_features(state: FeatureState, row: Mapping[str, Any], find: Callable[[str], Mapping[str, Any] | None]) -> Features:
    """Compute the features of an unprepared row; `find` returns the version's aggregates of a key.

    Raises:
        UncleanRecord: the preparation would have rejected the row.
    """
    if state.clean is not None:
        row = clean_record(dict(row), state.clean, Counter())
    return compute_features(state, row, find_aggregates(state, row, find))


def find_aggregates(
    state: FeatureState, row: Mapping[str, Any], find: Callable[[str], Mapping[str, Any] | None]
) -> Mapping[str, Any] | None:
    key = read_entity_key(state.features, row) if state.features.aggregates else None
    return None if key is None else find(key)


def check_features(spec: FeatureParameters, row: Mapping[str, Any]) -> None:
    """Raise UncleanRecord if features of the row could not be computed."""
    read_entity_key(spec, row)
    for column, feature in spec.columns.items():
        parse_number(row.get(column), column) if feature.normalize else parse_category(row.get(column), column)
    for column in spec.aggregate:
        parse_number(row.get(column), column)


def select_clean_rules(spec: FeatureParameters, clean: CleanParameters | None) -> CleanParameters | None:
    """Return the cleaning rules for the columns that serving requests contain."""
    if clean is None:
        return None
    asked = {*spec.columns, spec.key}
    return CleanParameters(
        required=tuple(column for column in clean.required if column in asked),
        fill={column: value for column, value in clean.fill.items() if column in asked},
        within={column: bounds for column, bounds in clean.within.items() if column in asked},
    )


def one_hot_column(column: str, category: str) -> str:
    return f"{column}={category}"


def read_entity_key(spec: FeatureParameters, row: Mapping[str, Any]) -> str | None:
    """Return the key of the row's entity, or None if it is missing."""
    return parse_category(row.get(spec.key), spec.key) if spec.key is not None else None


def parse_number(value: Any, column: str) -> float | None:
    """Parse a 64-bit number, with zero normalized to +0.0; None if it is missing.

    Raises UncleanRecord. Accepts numbers as text: in tables, a single non-numeric cell turns its whole column into text.
    """
    if is_missing(value):
        return None
    is_none = isinstance(value, bool) or (isinstance(value, str) and not NUMBER_TEXT.fullmatch(value))
    try:
        number = math.nan if is_none else float(value) + 0.0
    except (TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UncleanRecord("no number", f"'{column}' is not a number: convert it, or fill it or remove the record first")
    return number


def parse_category(value: Any, column: str) -> str | None:
    """Convert a text, number or boolean to a category.

    Raises UncleanRecord. 3 and 3.0 are equal, because tables convert between them.
    """
    if is_missing(value):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and (number := parse_number(value, column)) is not None:
        return str(int(number)) if number.is_integer() else repr(number)
    raise UncleanRecord("no category", f"'{column}' is neither a text nor a number")
