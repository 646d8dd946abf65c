"""Page tokens: where the next page begins, opaque to clients."""

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

from resources.errors import invalid


def encode_token(position: Sequence[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(list(position)).encode()).decode()


def decode_token(token: str, types: Sequence[type]) -> list[Any]:
    """The position in a token of ours, checked value by value. Raises a 400 for any other token."""
    try:
        position = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise invalid("Invalid page token, could not base64-decode") from None
    fits = isinstance(position, list) and len(position) == len(types)
    if not fits or any(type(value) is not kind for value, kind in zip(position, types, strict=True)):
        raise invalid("Invalid page token: it was not given out by this call")
    if any(kind is int and not -(2**63) <= value < 2**63 for value, kind in zip(position, types, strict=True)):
        raise invalid("Invalid page token: it was not given out by this call")
    return list(position)
