"""Files that are far larger unpacked than they are: some KB of those would keep the server busy, and fill its store."""

ENOUGH = 1 << 30
"""Bytes that anybody may unpack, however few they were."""
TIMES = 200
"""More than real data shrinks to: text to a tenth, logs that repeat themselves to a fiftieth."""
WORDS = f"unpacks to more than {TIMES} times its size: if it is data all the same, unpack it and send it as it is"

NAMES = f"has names of columns that make its records more than {TIMES} times as large as it is: shorten them"


def is_swollen(unpacked: int, packed: int) -> bool:
    return unpacked > max(ENOUGH, TIMES * packed)
