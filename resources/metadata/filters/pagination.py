"""Keyset pages: a page begins after the values that the last one ended with, not after a number of rows.

So a page costs the same wherever it is, and rows that are inserted or deleted meanwhile shift nothing.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, false, or_

from resources.errors import invalid
from resources.metadata.filters.page_token import Kind, checked_position, encode_token, not_ours, opened_token


@dataclass(frozen=True)
class SortKey:
    """One expression of an ORDER BY; `kind` is what its values are in Python."""

    column: ColumnElement[Any]
    ascending: bool
    kind: Kind


def absent_last(
    value: ColumnElement[Any], ascending: bool, kind: type, is_nan: ColumnElement[Any] | None = None
) -> list[SortKey]:
    """Numbers first, then NaN, then what has no value: in both directions, as in MLflow."""
    rank = case((value.is_(None), 2), else_=0) if is_nan is None else case((value.is_(None), 2), (is_nan, 1), else_=0)
    return [SortKey(rank, True, int), SortKey(value, ascending, (kind, NoneType))]


class Keyset:
    """The order of a search, of which the last key must be unique. `scope` is whatever else a token must agree with;
    `told` too, each by what a caller is told whose token does not."""

    def __init__(self, keys: Sequence[SortKey], scope: object = (), told: Mapping[str, object] | None = None) -> None:
        self._keys = keys
        self._told = {refusal: hashed(asked) for refusal, asked in (told or {}).items()}
        self._scopes = [*self._told.values(), hashed(scope)]

    def page(self, query: Select[Any], limit: int, page_token: str | None) -> Select[Any]:
        """The query for one page and one row more, which tells whether there is another page."""
        return self.ordered(query, self.position(page_token)).limit(limit + 1)

    def position(self, page_token: str | None) -> list[Any] | None:
        """The values of the keys that the last page ended with; None for the first page. Raises a 400 for a bad token."""
        if not page_token:
            return None
        sent = opened_token(page_token)
        scopes, position = sent[: len(self._scopes)], sent[len(self._scopes) :]
        if len(scopes) != len(self._scopes):
            raise not_ours()
        # Before the position, whose values are others where the order is another.
        for refusal, found in zip(self._told, scopes, strict=False):
            if found != self._told[refusal]:
                raise invalid(refusal)
        if scopes != self._scopes:
            raise not_ours()
        return checked_position(position, [key.kind for key in self._keys])

    def ordered(self, query: Select[Any], position: Sequence[Any] | None) -> Select[Any]:
        """The query from a position on, with the keys as its last columns. A value may be a parameter for it."""
        if position is not None:
            query = query.where(after(self._keys, position))
        order = [key.column if key.ascending else key.column.desc() for key in self._keys]
        return query.add_columns(*(key.column for key in self._keys)).order_by(*order)

    def next_token(self, rows: Sequence[Sequence[Any]], limit: int) -> str | None:
        """The token of the page after these rows of `page`, whose last columns are the keys."""
        if len(rows) <= limit:
            return None
        return encode_token((*self._scopes, *rows[limit - 1][-len(self._keys) :]))


def hashed(scope: object) -> str:
    return hashlib.sha256(repr(scope).encode()).hexdigest()[:12]


def after(keys: Sequence[SortKey], position: Sequence[Any]) -> ColumnElement[bool]:
    """Whether a row comes after `position`.

    A value of None was NULL: the rank before it says so, and all rows of that rank are equal here.
    """
    clause: ColumnElement[bool] = false()
    for key, value in zip(reversed(keys), reversed(position), strict=True):
        if value is None:
            continue
        beyond, upto = (
            (key.column > value, key.column >= value) if key.ascending else (key.column < value, key.column <= value)
        )
        # Not `beyond or (equal and ...)`: a bound that always holds is one that an index can be searched by.
        clause = and_(upto, or_(beyond, clause))
    return clause
