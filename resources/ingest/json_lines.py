"""Read JSON lines.

Any object is a record; a repeated key is refused, like a repeated column of a table.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from recipes.records.fingerprint import encode_in_order, encode_stored_line
from recipes.storage.manifest import canonical_json
from resources.ingest.problems import EMPTY, Problem

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
"""Maximum length of a line in bytes: a line that never ends would use all memory."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
decode = msgspec.json.Decoder().decode
ESCAPED_QUOTE = b"\\u0022"
"""A quote as some programs escape it. It is stored in another form, which could compensate for a lost quote."""


def split_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines without their ends. Only "\\n" ends a line.

    A line that is too long is truncated to `MAX_LINE_BYTES` bytes.
    """
    pending: list[bytes] = []
    length = 0
    while block := stream.read(BLOCK_BYTES):
        *whole, rest = block.split(b"\n")
        if whole:
            whole[0] = b"".join([*pending, whole[0]])[:MAX_LINE_BYTES]
            yield from whole
            pending, length = [], 0
        if length < MAX_LINE_BYTES:
            pending.append(rest)
            length += len(rest)
    if length:
        yield b"".join(pending)[:MAX_LINE_BYTES]


def read_json_lines(stream: BinaryIO) -> Iterator[tuple[dict[str, Any], bytes] | Problem]:
    """Yield the records, or problems in place of lines that are not records.

    Blank lines are skipped. With each record comes its stored line, which shows cheaply whether the reader has lost
    anything.
    """
    is_empty = True
    for number, raw in enumerate(split_lines(stream), start=1):
        found = parse_record(raw)
        if isinstance(found, str) and not raw.removeprefix(BYTE_ORDER_MARK).strip():
            continue
        if is_empty and isinstance(found, str) and is_document(raw):
            each = "." if raw.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{") else "'.[]'"
            yield Problem(f"is one JSON document over all its lines: write one object a line, as `jq -c {each} FILE` does")
            return
        is_empty = False
        yield Problem(found, f"line {number}") if isinstance(found, str) else found
    if is_empty:
        yield EMPTY


def parse_record(raw: bytes) -> tuple[dict[str, Any], bytes] | str:
    """Return a line's record with its stored line, or why it is not a record."""
    try:
        row = decode(raw)
    except (ValueError, RecursionError):
        row = decode_slowly(raw)
    if type(row) is not dict:
        return row.reason if isinstance(row, Problem) else "not a JSON object"
    line = encode_stored_line(row)
    # The fast reader keeps the last value of a repeated key, so the quotes of the others are missing. Quotes may also be
    # added.
    problem = find_repeated_key(raw) if raw.count(b'"') != line.count(b'"') or ESCAPED_QUOTE in raw else None
    return (row, line) if problem is None else problem


def parse_value(raw: bytes) -> Any:
    """Return the value of a JSON text, or a Problem."""
    try:
        found = decode(raw)
    except (ValueError, RecursionError):
        return Problem(describe_bad_line(raw))
    problem = (
        find_repeated_key(raw) if raw.count(b'"') != encode_in_order(found).count(b'"') or ESCAPED_QUOTE in raw else None
    )
    return found if problem is None else Problem(problem)


def is_document(first: bytes) -> bool:
    """Return whether a file with this first line is a single JSON document.

    Such a file is one array, or one object over several lines.
    """
    begins = first.removeprefix(BYTE_ORDER_MARK).strip()
    return begins.startswith(b"[") or begins == b"{"


class RepeatedKey(Exception):
    """An object has a repeated key."""


def find_repeated_key(raw: bytes) -> str | None:
    """Return the problem if a line repeats a key.

    The fast reader silently drops all but the last value.
    """
    try:
        json.loads(raw.decode("utf-8-sig"), object_pairs_hook=refuse_repeated)
    except RepeatedKey as key:
        return f"repeated key '{key}'"
    except RecursionError:
        return "nested too deeply"
    return None


def refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    key, count = Counter(key for key, _ in pairs).most_common(1)[0] if pairs else ("", 0)
    if count > 1:
        raise RepeatedKey(key[:100])


def decode_slowly(raw: bytes) -> Any:
    """Decode a line that the fast reader refuses.

    Returns the value of a line with a byte order mark, or else the problem.
    """
    if raw.startswith(BYTE_ORDER_MARK):
        try:
            return msgspec.json.decode(raw.removeprefix(BYTE_ORDER_MARK))
        except (ValueError, RecursionError):
            pass
    return Problem(describe_bad_line(raw))


def describe_bad_line(raw: bytes) -> str:
    """Describe the problem of a line, with a reader that reports the position."""
    if len(raw) == MAX_LINE_BYTES:
        return f"longer than {MAX_LINE_BYTES >> 20} MiB"
    try:
        canonical_json(json.loads(raw.decode("utf-8-sig")))
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg}, column {error.colno})"
    except UnicodeEncodeError:
        return "holds half a character (a lone surrogate)"
    except RecursionError:
        return "nested too deeply"
    except ValueError:
        pass
    return "holds a number that is not finite or has too many digits"
