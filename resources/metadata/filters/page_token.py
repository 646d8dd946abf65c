"""Page tokens: where the next page begins, opaque to clients."""

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

from recipes.contracts.frozen_model import UNSTORABLE
from resources.errors import HanzoError, invalid

Kind = type | tuple[type, ...]
"""What one value of a position may be: exactly one type (true is no int), or one of several."""


def encode_token(position: Sequence[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(list(position)).encode()).decode()


def decode_token(token: str, types: Sequence[Kind]) -> list[Any]:
    """The position in a token of ours, checked value by value. Raises a 400 for any other token."""
    return checked_position(opened_token(token), types)


def opened_token(token: str) -> list[Any]:
    """What is in a token, whatever it is, and whoever made it."""
    try:
        position = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise invalid("Invalid page token, could not base64-decode") from None
    if not isinstance(position, list):
        raise not_ours()
    return position


def checked_position(position: Sequence[Any], types: Sequence[Kind]) -> list[Any]:
    if len(position) != len(types) or not all(_fits(value, kind) for value, kind in zip(position, types, strict=True)):
        raise not_ours()
    return list(position)


def not_ours() -> HanzoError:
    return invalid("Invalid page token: it was not given out by this call")


def _fits(value: Any, kind: Kind) -> bool:
    if type(value) not in (kind if isinstance(kind, tuple) else (kind,)):
        return False
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return not (isinstance(value, str) and UNSTORABLE.search(value))
