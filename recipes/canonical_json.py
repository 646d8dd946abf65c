"""JSON of which two equal values have equal bytes, and so equal hashes."""

import json
from typing import Any


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value, so that equal values have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
