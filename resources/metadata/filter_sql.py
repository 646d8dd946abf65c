"""Conditions of the filter language as SQL that means the same on SQLite and PostgreSQL."""

import re
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, not_, or_
from sqlalchemy.sql.expression import FromClause

from resources.metadata.filter_language import Condition, Value


def compare(column: ColumnElement[Any], operator: str, value: Value, dialect: str) -> ColumnElement[bool]:
    """One comparison. LIKE heeds case, ILIKE does not, and a backslash is an ordinary character."""
    if operator in ("LIKE", "ILIKE"):
        pattern = str(value)
        if dialect == "postgresql":
            escaped = pattern.replace("\\", "\\\\")
            return column.like(escaped) if operator == "LIKE" else column.ilike(escaped)
        # LIKE of SQLite does not heed case, GLOB does.
        return column.op("GLOB")(as_glob(pattern)) if operator == "LIKE" else column.ilike(pattern)
    if operator in ("IN", "NOT IN"):
        assert isinstance(value, tuple)
        return column.in_(value) if operator == "IN" else column.not_in(value)
    return {
        "=": column.__eq__,
        "!=": column.__ne__,
        "<": column.__lt__,
        "<=": column.__le__,
        ">": column.__gt__,
        ">=": column.__ge__,
    }[operator](value)


def as_glob(pattern: str) -> str:
    """A LIKE pattern as one for GLOB, in which * ? [ would be special."""
    return re.sub(r"[*?\[]", r"[\g<0>]", pattern).replace("%", "*").replace("_", "?")


def compare_keyed(table: FromClause, owner: ColumnElement[bool], condition: Condition, dialect: str) -> ColumnElement[bool]:
    """A condition on a (key, value) table: one look-up by its primary key for each candidate."""
    row = and_(owner, table.c.key == condition.key)
    if condition.operator == "IS NULL":
        return not_(exists().where(row))
    if condition.operator == "IS NOT NULL":
        return exists().where(row)
    matches = compare(table.c.value, condition.operator, condition.value, dialect)
    if condition.entity == "metric":
        # NaN is stored as 0.0, but it is neither above nor below nor equal to anything.
        matches = or_(table.c.is_nan, matches) if condition.operator == "!=" else and_(not_(table.c.is_nan), matches)
    return exists().where(row, matches)
