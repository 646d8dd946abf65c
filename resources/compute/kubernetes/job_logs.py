"""Log of a job on a cluster: the segments that the launchers of its first node uploaded, as one text over all attempts.

A segment never changes once it is there, so offsets are stable: sizes are listed once, and bytes read where they are asked
for.
"""

from dataclasses import dataclass, field

from recipes.storage import uris
from recipes.storage.artifact_store import Store
from recipes.storage.object_store import ObjectEntry
from resources.compute.base import JobKey


@dataclass
class AttemptLog:
    """Segments of one attempt, as far as they were listed. `complete`: a later attempt exists, so none is added."""

    segments: list[ObjectEntry] = field(default_factory=list)
    complete: bool = False

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)


class JobLogs:
    """Reads logs. What is cached are sizes of segments: another process finds the same."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._logs: dict[tuple[str, str], dict[int, AttemptLog]] = {}

    def size(self, job: JobKey, attempts: int) -> int:
        """Bytes of the log of the first `attempts` attempts."""
        return sum(log.size for log in self._list(job, attempts))

    def read(self, job: JobKey, attempts: int, offset: int, max_bytes: int | None = None) -> bytes:
        """Bytes from `offset` on, at most `max_bytes`."""
        parts: list[bytes] = []
        left = float("inf") if max_bytes is None else max_bytes
        begin = 0
        for log in self._list(job, attempts):
            for segment in log.segments:
                start = max(0, offset - begin)
                begin += segment.size
                if start < segment.size and left > 0:
                    part = self._store.get_bytes(segment.uri)[start:][: None if max_bytes is None else int(left)]
                    parts.append(part)
                    left -= len(part)
        return b"".join(parts)

    def _list(self, job: JobKey, attempts: int) -> list[AttemptLog]:
        logs = self._logs.setdefault((job.id, job.program), {})
        for number in range(1, attempts + 1):
            log = logs.setdefault(number, AttemptLog())
            if not log.complete:
                last = log.segments[-1].uri if log.segments else None
                log.segments += self._store.entries(uris.node_log(job.id, job.program, number, 0), after=last)
                log.complete = number < attempts
        return [logs[number] for number in range(1, attempts + 1)]
