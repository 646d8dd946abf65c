"""What a service logged as it failed, in one line."""

import re
from itertools import dropwhile

TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n", re.MULTILINE)


CAUSED_BY = "The above exception was the direct cause of the following exception:"


MAX_CHARACTERS = 600
"""Characters."""


def failure_summary(log: str) -> str:
    """The last line, or the last exception: of those that caused each other the first, which knows what was wrong."""
    parts = TRACEBACK.split(log)
    if len(parts) == 1:
        return (log.strip().splitlines() or ["it wrote nothing"])[-1]
    first = len(parts) - 1
    while first > 1 and parts[first - 1].rstrip().endswith(CAUSED_BY):
        first -= 1
    lines = parts[first].rstrip().removesuffix(CAUSED_BY).splitlines()
    message_lines = dropwhile(lambda line: line.startswith(" "), lines)
    return " ".join(line.strip() for line in message_lines).strip()[:MAX_CHARACTERS]
