"""What a record is known by, in whatever version it stands: 64 bits of all of it, and of what it says.

Keys in another order, other spaces or escapes in its JSON make the same record. The same texts in another layout, other
capitals or punctuation make another record that says the same.
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
"""Keys of the layouts that a model reads. Of a record in none of them, and with no messages, all texts count."""
TEXT_TYPES = {str}
LOWERCASE_BYTES = bytes(range(256)).lower()
NON_ALPHANUMERIC_BYTES = bytes(code for code in range(128) if not chr(code).isalnum())
NON_ASCII_PUNCTUATION = re.compile("[\xa0-\xbf\u2000-\u206f\u3000-\u303f]")
"""Beside that of ASCII: of Latin-1, of the General Punctuation block, and of CJK."""

encode_canonical_line = msgspec.json.Encoder(order="sorted").encode
"""A record as the line that it is known by: all keys sorted, without the newline."""
encode_in_order = msgspec.json.Encoder().encode


def encode_stored_line(row: Mapping[str, Any]) -> bytes:
    """A record as the one line that it is stored as, without the newline.

    It is the canonical line, but for the arguments of tool calls and the parameters of tools: a model reads their keys in
    the order in which they were written.
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
    """The canonical line of a record, given its stored one, which most often is the same."""
    return line if next(find_ordered_objects(row), None) is None else encode_canonical_line(row)


class Fingerprint(NamedTuple):
    """`record` is the hash of the canonical line, `text` that of what it says; a record without texts says all it is."""

    record: int
    text: int


hash_record = xxhash.xxh3_64_intdigest
"""The hash of a record, from its canonical line."""


def fingerprint_record(row: Mapping[str, Any], line: bytes) -> Fingerprint:
    """The hashes of a record and of its line (XXH3, 64 bits), whatever the order of its keys."""
    (text,), (record,) = fingerprint_records([row], [line])
    return Fingerprint(record, text)


def fingerprint_records(rows: Sequence[Mapping[str, Any]], lines: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Of each record, given with its line, the hash of what it says, and of its canonical line."""
    records = [hash_record(to_canonical_line(row, line)) for row, line in zip(rows, lines, strict=True)]
    # Sorted, because another layout has its texts in another order.
    normalized = [b"\0".join(sorted([normalize_letters(text) for text in read_texts(row)])) for row in rows]
    return [hash_record(text) if text else record for text, record in zip(normalized, records, strict=True)], records


def read_texts(row: Mapping[str, Any]) -> Iterable[str]:
    """What a model would read of a record."""
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
    """All texts in a JSON value, however deep it is nested; keys are none."""
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
    """The text without capitals, spaces and punctuation; compatible forms of a character are one (Unicode NFKC)."""
    if not text.isascii():
        text = NON_ASCII_PUNCTUATION.sub("", unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()))
    return text.encode().translate(LOWERCASE_BYTES, NON_ALPHANUMERIC_BYTES)
