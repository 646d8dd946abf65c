"""What a service logged as it failed, in one line."""

import json
import re
from itertools import dropwhile

TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n", re.MULTILINE)


CAUSED_BY = "The above exception was the direct cause of the following exception:"


MAX_CHARACTERS = 600
"""Characters."""


def read_line(line: str) -> str:
    """The text of a line of a JSON log (`resources.service_logs`); any other line as it is."""
    if not line.startswith("{"):
        return line
    try:
        document = json.loads(line)
        return "\n".join(filter(None, (document["message"], document.get("exception"))))
    except (ValueError, KeyError, TypeError):
        return line


def failure_summary(log: str) -> str:
    """The last line, or the last exception: of those that caused each other the first, which knows what was wrong."""
    parts = TRACEBACK.split("\n".join(read_line(line) for line in log.splitlines()))
    if len(parts) == 1:
        return (parts[0].strip().splitlines() or ["it wrote nothing"])[-1]
    first = len(parts) - 1
    while first > 1 and parts[first - 1].rstrip().endswith(CAUSED_BY):
        first -= 1
    lines = parts[first].rstrip().removesuffix(CAUSED_BY).splitlines()
    message_lines = dropwhile(lambda line: line.startswith(" "), lines)
    return " ".join(line.strip() for line in message_lines).strip()[:MAX_CHARACTERS]
