"""Summarize in one line why a service failed, from its log."""

import json
import re
from itertools import dropwhile

TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n", re.MULTILINE)


CAUSED_BY = "The above exception was the direct cause of the following exception:"


MAX_CHARACTERS = 600
"""Maximum length of a summary."""


def read_line(line: str) -> str:
    """Return the text of a JSON log line (`resources.service_logs`), other lines unchanged."""
    if not line.startswith("{"):
        return line
    try:
        document = json.loads(line)
        return "\n".join(filter(None, (document["message"], document.get("exception"))))
    except (ValueError, KeyError, TypeError):
        return line


def failure_summary(log: str) -> str:
    """Return the last line or the last exception of a log.

    Of chained exceptions return the first, which is the root cause.
    """
    parts = TRACEBACK.split("\n".join(read_line(line) for line in log.splitlines()))
    if len(parts) == 1:
        return (parts[0].strip().splitlines() or ["it wrote nothing"])[-1]
    first = len(parts) - 1
    while first > 1 and parts[first - 1].rstrip().endswith(CAUSED_BY):
        first -= 1
    lines = parts[first].rstrip().removesuffix(CAUSED_BY).splitlines()
    message_lines = dropwhile(lambda line: line.startswith(" "), lines)
    return " ".join(line.strip() for line in message_lines).strip()[:MAX_CHARACTERS]
