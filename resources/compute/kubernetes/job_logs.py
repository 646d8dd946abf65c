"""Read a cluster job's log: uploaded segments of all attempts as one text.

The launchers of the first node upload them. Segments never change and are numbered from 0 without gaps
(`recipes.launch.log_segments`), so offsets are stable, and polling a long log checks one number instead of a listing.
"""

import threading
from dataclasses import dataclass, field

from recipes.storage import uris
from recipes.storage.artifact_store import Store
from recipes.storage.object_store import ObjectEntry
from resources.compute.base import JobKey


@dataclass
class AttemptLog:
    """Known log segments of one attempt.

    `is_complete`: a later attempt exists, so none is added.
    """

    folder: str
    segments: list[ObjectEntry] = field(default_factory=list)
    is_complete: bool = False

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)


class JobLogs:
    """Log reader with a cache of segment sizes, which are the same in every process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._logs: dict[tuple[str, str], dict[int, AttemptLog]] = {}
        self._lock = threading.Lock()  # the API's threads share it

    def size(self, job: JobKey, attempts: int) -> int:
        """Return the log size in bytes of the first `attempts` attempts."""
        return sum(log.size for log in self._list(job, attempts))

    def read(self, job: JobKey, attempts: int, offset: int, max_bytes: int | None = None) -> bytes:
        """Read at most `max_bytes` from `offset`."""
        parts: list[bytes] = []
        left = float("inf") if max_bytes is None else max_bytes
        begin = 0
        for log in self._list(job, attempts):
            for segment in log.segments:
                start = max(0, offset - begin)
                begin += segment.size
                if start < segment.size and left > 0:
                    stop = segment.size if max_bytes is None else min(segment.size, start + int(left))
                    stored = self._store.open_known_size(segment.uri, segment.size)
                    part = b"".join(stored.chunks(start, stop))
                    parts.append(part)
                    left -= len(part)
        return b"".join(parts)

    def _list(self, job: JobKey, attempts: int) -> list[AttemptLog]:
        with self._lock:
            return self._update(self._logs.setdefault((job.id, job.program), {}), job, attempts)

    def _update(self, logs: dict[int, AttemptLog], job: JobKey, attempts: int) -> list[AttemptLog]:
        for number in range(1, attempts + 1):
            if number not in logs:
                folder = uris.node_log(job.id, job.program, number, 0)
                logs[number] = AttemptLog(folder, self._store.entries(folder))
            if not logs[number].is_complete:
                self._find_more(logs[number])
                logs[number].is_complete = number < attempts
        return [logs[number] for number in range(1, attempts + 1)]

    def _find_more(self, log: AttemptLog) -> None:
        while True:
            uri = f"{log.folder}/{len(log.segments):06d}.log"
            try:
                log.segments.append(ObjectEntry(uri, self._store.size(uri)))
            except FileNotFoundError:
                return
