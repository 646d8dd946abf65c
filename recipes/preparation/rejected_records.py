"""Report rejected records with file, line and reason."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from recipes.preparation.plan import Plan, atomic_path


class Reject(msgspec.Struct, array_like=True):
    """A line of a range, from 1, and why it was rejected: `reason` is one of a few, `detail` is about this record."""

    line: int
    reason: str
    detail: str = ""


def write_rejected_records(path: Path, plan: Plan, ranges: Iterable[tuple[int, list[Reject]]]) -> Counter[str]:
    """Write all rejects in the order of the input; returns how many for each reason.

    Args:
        ranges: of each range of the plan, in order, how many lines it has and what was rejected of it. A record's text is
            not written: it may be what should not be kept.
    """
    counts: Counter[str] = Counter()

    def lines() -> Iterator[str]:
        before, file = 0, None
        for place, (length, rejects) in zip(plan.ranges, ranges, strict=True):
            before = before if place.file == file else 0
            file = place.file
            for reject in sorted(rejects, key=lambda reject: reject.line):
                counts[reject.reason] += 1
                row = {"file": file, "line": before + reject.line, "reason": reject.reason, "detail": reject.detail}
                yield json.dumps(row, ensure_ascii=False) + "\n"
            before += length

    with atomic_path(path) as part, part.open("w", encoding="utf-8") as out:
        out.writelines(lines())
    return counts
