"""Translate filter conditions into SQL that means the same on SQLite and PostgreSQL."""

import re
from typing import Any

from sqlalchemy import BindParameter, Column, ColumnElement, and_, exists, func, not_, or_, true
from sqlalchemy.sql.expression import FromClause

from resources.metadata.filters.parser import Condition, Value

Parameters = BindParameter[Any] | tuple[BindParameter[Any], ...]
"""Placeholders for one or several values, bound at execution to results of `dialect_value`."""


def compare(column: ColumnElement[Any], operator: str, value: Value | Parameters, dialect: str) -> ColumnElement[bool]:
    """Compare a column. LIKE is case-sensitive, ILIKE is not; a backslash is an ordinary character."""
    operand: Any = value if isinstance(value, BindParameter) else dialect_value(operator, value, dialect)
    if operator == "LIKE":
        # SQLite's LIKE is case-insensitive, its GLOB is case-sensitive.
        return column.like(operand) if dialect == "postgresql" else column.op("GLOB")(operand)
    if operator == "ILIKE":
        return column.ilike(operand)
    if operator in ("IN", "NOT IN"):
        return column.in_(operand) if operator == "IN" else column.not_in(operand)
    return {
        "=": column.__eq__,
        "!=": column.__ne__,
        "<": column.__lt__,
        "<=": column.__le__,
        ">": column.__gt__,
        ">=": column.__ge__,
    }[operator](operand)


def compare_absent(column: Column[Any], operator: str, value: Value, dialect: str) -> ColumnElement[bool]:
    """Like `compare`, but treat a NULL as the empty text.

    MLflow stores an empty text there, which `!=` matches like any other.
    """
    expected = value if isinstance(value, tuple) else (value,)
    # Without COALESCE, an equality can use an index.
    if not column.nullable or (operator in ("=", "IN") and "" not in expected):
        return compare(column, operator, value, dialect)
    return compare(func.coalesce(column, ""), operator, value, dialect)


def dialect_value(operator: str, value: Any, dialect: str) -> Any:
    """Return a value in the form of the dialect's operator: patterns differ."""
    if operator not in ("LIKE", "ILIKE"):
        return value
    if dialect == "postgresql":
        return str(value).replace("\\", "\\\\")
    return to_glob(str(value)) if operator == "LIKE" else str(value)


def to_glob(pattern: str) -> str:
    """Convert a LIKE pattern to GLOB, escaping `*`, `?` and `[`."""
    return re.sub(r"[*?\[]", r"[\g<0>]", pattern).replace("%", "*").replace("_", "?")


def compare_keyed(
    table: FromClause, owner: ColumnElement[bool], condition: Condition, dialect: str, expected: Parameters | None = None
) -> ColumnElement[bool]:
    """Return a condition on a (key, value) table: one primary key look-up per candidate.

    Args:
        expected: a parameter that replaces the condition's own value.
    """
    row = and_(owner, table.c.key == condition.key)
    if condition.operator == "IS NULL":
        return not_(exists().where(row))
    return exists().where(row, row_matches(table, condition, condition.value if expected is None else expected, dialect))


def row_matches(table: FromClause, condition: Condition, value: Value | Parameters, dialect: str) -> ColumnElement[bool]:
    """Return the condition that a row with the right key has a matching value."""
    if condition.operator == "IS NOT NULL":
        return true()
    compared = compare(table.c.value, condition.operator, value, dialect)
    if condition.entity != "metric":
        return compared
    # NaN is stored as 0.0, but is not comparable to anything.
    return or_(table.c.is_nan, compared) if condition.operator == "!=" else and_(not_(table.c.is_nan), compared)
