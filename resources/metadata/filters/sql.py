"""Conditions of the filter language as SQL that means the same on SQLite and PostgreSQL."""

import re
from typing import Any

from sqlalchemy import BindParameter, Column, ColumnElement, and_, exists, func, not_, or_, true
from sqlalchemy.sql.expression import FromClause

from resources.metadata.filters.parser import Condition, Value

Parameters = BindParameter[Any] | tuple[BindParameter[Any], ...]
"""In the place of a value, or of several, that a statement is given when it is executed: `dialect_value` ones."""


def compare(column: ColumnElement[Any], operator: str, value: Value | Parameters, dialect: str) -> ColumnElement[bool]:
    """One comparison. LIKE heeds case, ILIKE does not, and a backslash is an ordinary character."""
    operand: Any = value if isinstance(value, BindParameter) else dialect_value(operator, value, dialect)
    if operator == "LIKE":
        # LIKE of SQLite does not heed case, GLOB does.
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
    """`compare`, of a text that may be absent too: MLflow keeps an empty one then, which `!=` finds as it finds any."""
    expected = value if isinstance(value, tuple) else (value,)
    # Of what is asked for by its value, an index is of use.
    if not column.nullable or (operator in ("=", "IN") and "" not in expected):
        return compare(column, operator, value, dialect)
    return compare(func.coalesce(column, ""), operator, value, dialect)


def dialect_value(operator: str, value: Any, dialect: str) -> Any:
    """A value as the dialect's operator takes it: what differs is how a pattern is written."""
    if operator not in ("LIKE", "ILIKE"):
        return value
    if dialect == "postgresql":
        return str(value).replace("\\", "\\\\")
    return to_glob(str(value)) if operator == "LIKE" else str(value)


def to_glob(pattern: str) -> str:
    """A LIKE pattern as one for GLOB, in which * ? [ would be special."""
    return re.sub(r"[*?\[]", r"[\g<0>]", pattern).replace("%", "*").replace("_", "?")


def compare_keyed(
    table: FromClause, owner: ColumnElement[bool], condition: Condition, dialect: str, expected: Parameters | None = None
) -> ColumnElement[bool]:
    """A condition on a (key, value) table: one look-up by its primary key for each candidate.

    Args:
        asked: a parameter in the place of the condition's own value.
    """
    row = and_(owner, table.c.key == condition.key)
    if condition.operator == "IS NULL":
        return not_(exists().where(row))
    return exists().where(row, row_matches(table, condition, condition.value if expected is None else expected, dialect))


def row_matches(table: FromClause, condition: Condition, value: Value | Parameters, dialect: str) -> ColumnElement[bool]:
    """Whether a row of a (key, value) table that has the condition's key is one that the condition asks for."""
    if condition.operator == "IS NOT NULL":
        return true()
    compared = compare(table.c.value, condition.operator, value, dialect)
    if condition.entity != "metric":
        return compared
    # NaN is stored as 0.0, but it is neither above nor below nor equal to anything.
    return or_(table.c.is_nan, compared) if condition.operator == "!=" else and_(not_(table.c.is_nan), compared)
