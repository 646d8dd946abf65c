"""Keyset pagination and its opaque page tokens."""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, false, or_

from recipes.contracts.frozen_model import UNSTORABLE_CHARACTERS
from resources.errors import HanzoError, invalid

# Page tokens are opaque to clients and hold where the next page begins.

ValueKind = type | tuple[type, ...]
"""Allowed type of one value of a position: exactly one type (true is no int), or one of several."""


def encode_token(position: Sequence[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(list(position)).encode()).decode()


def decode_token(token: str, types: Sequence[ValueKind]) -> list[Any]:
    """Decode one of our tokens and check its values. Raises a 400 otherwise."""
    return checked_position(open_token(token), types)


def open_token(token: str) -> list[Any]:
    """Decode a token without checking its content or origin."""
    try:
        position = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise invalid("Invalid page token, could not base64-decode") from None
    if not isinstance(position, list):
        raise foreign_token_error()
    return position


def checked_position(position: Sequence[Any], types: Sequence[ValueKind]) -> list[Any]:
    if len(position) != len(types) or not all(_fits(value, kind) for value, kind in zip(position, types, strict=True)):
        raise foreign_token_error()
    return list(position)


def foreign_token_error() -> HanzoError:
    return invalid("Invalid page token: it was not issued by this call")


def _fits(value: Any, kind: ValueKind) -> bool:
    if type(value) not in (kind if isinstance(kind, tuple) else (kind,)):
        return False
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return not (isinstance(value, str) and UNSTORABLE_CHARACTERS.search(value))


# Keyset pagination: a page begins after the last key of the previous page, not after a number of rows.
#
# So every page costs the same, and concurrent inserts or deletes shift nothing.


@dataclass(frozen=True)
class SortKey:
    """One expression of an ORDER BY; `kind` is the Python type of its values."""

    column: ColumnElement[Any]
    ascending: bool
    kind: ValueKind


def nulls_last(
    value: ColumnElement[Any], ascending: bool, kind: type, is_nan: ColumnElement[Any] | None = None
) -> list[SortKey]:
    """Order numbers first, then NaN, then NULL: in both directions, as in MLflow."""
    rank = case((value.is_(None), 2), else_=0) if is_nan is None else case((value.is_(None), 2), (is_nan, 1), else_=0)
    return [SortKey(rank, True, int), SortKey(value, ascending, (kind, NoneType))]


class Keyset:
    """The order of a search; its last key must be unique.

    A token is only valid for an equal `scope` and equal `mismatches`, which map the error message to the value that must
    agree.
    """

    def __init__(self, keys: Sequence[SortKey], scope: object = (), mismatches: Mapping[str, object] | None = None) -> None:
        self._keys = keys
        self._mismatches = {refusal: scope_hash(value) for refusal, value in (mismatches or {}).items()}
        self._scopes = [*self._mismatches.values(), scope_hash(scope)]

    def page(self, query: Select[Any], limit: int, page_token: str | None) -> Select[Any]:
        """Return the query for one page plus one row, which shows whether another page exists."""
        return self.ordered(query, self.position(page_token)).limit(limit + 1)

    def position(self, page_token: str | None) -> list[Any] | None:
        """Return the key values where the last page ended, or None for the first page.

        Raises a 400 for a bad token.
        """
        if not page_token:
            return None
        sent = open_token(page_token)
        scopes, position = sent[: len(self._scopes)], sent[len(self._scopes) :]
        if len(scopes) != len(self._scopes):
            raise foreign_token_error()
        # Check these before the position, whose types depend on the order.
        for refusal, found in zip(self._mismatches, scopes, strict=False):
            if found != self._mismatches[refusal]:
                raise invalid(refusal)
        if scopes != self._scopes:
            raise foreign_token_error()
        return checked_position(position, [key.kind for key in self._keys])

    def ordered(self, query: Select[Any], position: Sequence[Any] | None) -> Select[Any]:
        """Start a query after a position, with the keys as its last columns.

        A position's value may be a bind parameter.
        """
        if position is not None:
            query = query.where(is_after(self._keys, position))
        order = [key.column if key.ascending else key.column.desc() for key in self._keys]
        return query.add_columns(*(key.column for key in self._keys)).order_by(*order)

    def next_token(self, rows: Sequence[Sequence[Any]], limit: int) -> str | None:
        """Return the next page's token, given rows of `page` whose last columns are the keys."""
        if len(rows) <= limit:
            return None
        return encode_token((*self._scopes, *rows[limit - 1][-len(self._keys) :]))


def scope_hash(scope: object) -> str:
    return hashlib.sha256(repr(scope).encode()).hexdigest()[:12]


def is_after(keys: Sequence[SortKey], position: Sequence[Any]) -> ColumnElement[bool]:
    """Return the condition that a row comes after `position`.

    None was NULL: the rank key before it expresses that, and all rows of that rank are equal in this key.
    """
    clause: ColumnElement[bool] = false()
    for key, value in zip(reversed(keys), reversed(position), strict=True):
        if value is None:
            continue
        strictly_after, at_or_after = (
            (key.column > value, key.column >= value) if key.ascending else (key.column < value, key.column <= value)
        )
        # Not `beyond or (equal and ...)`: an index can only be searched by a bound that always holds.
        clause = and_(at_or_after, or_(strictly_after, clause))
    return clause
