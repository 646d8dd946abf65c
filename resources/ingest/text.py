"""Text: each line that holds something is a record with the one column `text`."""

from collections.abc import Iterator
from typing import Any, BinaryIO

from resources.ingest.json_lines import BYTE_ORDER_MARK, LONGEST, lines_of
from resources.ingest.problems import Problem


def text_records(stream: BinaryIO) -> Iterator[dict[str, Any] | Problem]:
    is_empty = True
    for number, line in enumerate(lines_of(stream), start=1):
        raw = line.removeprefix(BYTE_ORDER_MARK)
        if not raw or raw.isspace():
            continue
        is_empty = False
        if len(line) == LONGEST:
            yield Problem(f"longer than {LONGEST >> 20} MiB", f"line {number}")
            continue
        try:
            yield {"text": raw.removesuffix(b"\r").decode()}
        except UnicodeDecodeError:
            yield Problem("not UTF-8", f"line {number}")
    if is_empty:
        yield Problem("is empty: a dataset needs at least one record")
