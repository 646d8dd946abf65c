"""Fingerprints of records, independent of the version.

64-bit hashes of the whole record and of its text. Order of keys, whitespace and escapes in JSON do not matter. The same
texts in another layout, or with other case or punctuation, have another record hash and the same text hash.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from recipes.records.conversation import find_ordered_objects
from recipes.records.record_layouts import LAYOUT_KEYS, Layout

TEXT_KEYS: Sequence[tuple[str, ...]] = [keys for layout, keys in LAYOUT_KEYS.items() if layout is not Layout.MESSAGES]
"""Keys of the layouts that a model reads. If a record has none of them and no messages, all texts count."""
TEXT_TYPES = {str}
LOWERCASE_BYTES = bytes(range(256)).lower()
NON_ALPHANUMERIC_BYTES = bytes(code for code in range(128) if not chr(code).isalnum())
NON_ASCII_PUNCTUATION = re.compile("[\xa0-\xbf\u2000-\u206f\u3000-\u303f]")
"""Punctuation in addition to ASCII: of Latin-1, the General Punctuation block, and CJK."""

encode_canonical_line = msgspec.json.Encoder(order="sorted").encode
"""Encode a record as its canonical line: all keys sorted, without a newline."""
encode_in_order = msgspec.json.Encoder().encode


def encode_stored_line(row: Mapping[str, Any]) -> bytes:
    """Encode a record as the line to store, without a newline.

    It equals the canonical line, except that arguments of tool calls and parameters of tools keep their order of keys, which
    a model reads.
    """
    places = list(find_ordered_objects(row))
    if not places:
        return encode_canonical_line(row)
    values = [holder[key] for holder, key in places]
    try:
        for (holder, key), value in zip(places, values, strict=True):
            holder[key] = msgspec.Raw(encode_in_order(value))
        return encode_canonical_line(row)
    finally:
        for (holder, key), value in zip(places, values, strict=True):
            holder[key] = value


def to_canonical_line(row: Mapping[str, Any], line: bytes) -> bytes:
    """Return a record's canonical line, given its stored one, which is usually the same."""
    return line if next(find_ordered_objects(row), None) is None else encode_canonical_line(row)


class Fingerprint(NamedTuple):
    """Hashes of the canonical line (`record`) and of the text.

    Equal for a record without text.
    """

    record: int
    text: int


hash_record = xxhash.xxh3_64_intdigest
"""Hash of a record, from its canonical line."""


def fingerprint_record(row: Mapping[str, Any], line: bytes) -> Fingerprint:
    """Return the hashes of a record (XXH3, 64 bits), independent of the order of keys."""
    (text,), (record,) = fingerprint_records([row], [line])
    return Fingerprint(record, text)


def fingerprint_records(rows: Sequence[Mapping[str, Any]], lines: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Return the text hashes and record hashes of records, given with their lines."""
    records = [hash_record(to_canonical_line(row, line)) for row, line in zip(rows, lines, strict=True)]
    # Sorted, because layouts differ in the order of their texts.
    normalized = [b"\0".join(sorted([normalize_letters(text) for text in read_texts(row)])) for row in rows]
    return [hash_record(text) if text else record for text, record in zip(normalized, records, strict=True)], records


def read_texts(row: Mapping[str, Any]) -> Iterable[str]:
    """Return the texts of a record that a model would read."""
    for keys in TEXT_KEYS:
        if keys[0] in row:
            found: list[Any] = [row.get(key) for key in keys]
            if set(map(type, found)) == TEXT_TYPES:
                return found
    messages = row.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return iterate_strings([message.get("content") for message in messages])
    return iterate_strings(row)


def iterate_strings(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value recursively, except keys."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def normalize_letters(text: str) -> bytes:
    """Remove case, whitespace and punctuation; compatible characters are unified (Unicode NFKC)."""
    if not text.isascii():
        text = NON_ASCII_PUNCTUATION.sub("", unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()))
    return text.encode().translate(LOWERCASE_BYTES, NON_ALPHANUMERIC_BYTES)
