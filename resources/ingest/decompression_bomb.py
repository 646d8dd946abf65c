"""Refuse decompression bombs: a few KB could keep the server busy and fill its store."""

ALWAYS_ALLOWED_BYTES = 1 << 30
"""Decompressed size in bytes that is always allowed, however small the file is."""


MAX_EXPANSION_FACTOR = 200
"""Real data compresses less than this: text to a tenth, repetitive logs to a fiftieth."""


EXPANSION_MESSAGE = (
    f"unpacks to more than {MAX_EXPANSION_FACTOR} times its size: if it is data all the same, unpack it and send it as it is"
)


COLUMN_NAMES_MESSAGE = (
    f"has names of columns that make its records more than {MAX_EXPANSION_FACTOR} times as large as it is: shorten them"
)


def exceeds_expansion_limit(unpacked: int, packed: int) -> bool:
    return unpacked > max(ALWAYS_ALLOWED_BYTES, MAX_EXPANSION_FACTOR * packed)
