"""Refuse files that are far larger unpacked than packed: some KB would keep the server busy and fill its store."""

ALWAYS_ALLOWED_BYTES = 1 << 30
"""Bytes that anybody may unpack, however few they were."""


MAX_EXPANSION_FACTOR = 200
"""More than real data shrinks to: text to a tenth, logs that repeat themselves to a fiftieth."""


EXPANSION_MESSAGE = (
    f"unpacks to more than {MAX_EXPANSION_FACTOR} times its size: if it is data all the same, unpack it and send it as it is"
)


COLUMN_NAMES_MESSAGE = (
    f"has names of columns that make its records more than {MAX_EXPANSION_FACTOR} times as large as it is: shorten them"
)


def exceeds_expansion_limit(unpacked: int, packed: int) -> bool:
    return unpacked > max(ALWAYS_ALLOWED_BYTES, MAX_EXPANSION_FACTOR * packed)
