"""A run's revision changes with everything it logs, and keys cached renderings.

The increment is in the same transaction. A run's own columns do not change it.
"""

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence

from sqlalchemy import Connection, Table, func, select, update

from resources.metadata.tables import runs
from resources.metadata.tracking.run_states import Run

CACHE_BYTES = 32 << 20
"""Size of the cache: about twenty thousand runs, each with ten metrics and ten params."""


def new_revision() -> int:
    """Return a random revision: a run id may recur after the store was emptied."""
    return secrets.randbits(62)


def bump_revision(writer: Connection, run_id: str) -> None:
    """Increment the revision before changing what a run logged; also locks the run's row."""
    writer.execute(update(runs).where(runs.c.id == run_id).values(revision=runs.c.revision + 1))


def next_position(writer: Connection, table: Table, run_id: str) -> int:
    """Return the next `place` of a run in a table; its row must be locked."""
    last = select(func.max(table.c.place)).where(table.c.run_id == run_id)
    place: int | None = writer.execute(last).scalar_one()
    return 0 if place is None else place + 1


class RenderingCache:
    """Cache what was rendered from runs' logs, by run and revision; evicts the oldest.

    A run's row is read before its logs, so a rendering may be newer than its revision, and is then repeated, but never
    older. Thread-safe.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._kept: dict[str, tuple[int, bytes]] = {}
        self._changing = threading.Lock()

    def get_or_render(self, found: Sequence[Run], make: Callable[[Sequence[Run]], Iterable[bytes]]) -> list[bytes]:
        """Return the rendering of each run, cached or created by `make`."""
        known = [self._kept.get(run.id) for run in found]
        missing = [run for run, kept in zip(found, known, strict=True) if kept is None or kept[0] != run.revision]
        made = iter(self._keep(missing, list(make(missing))) if missing else ())
        return [
            next(made) if kept is None or kept[0] != run.revision else kept[1]
            for run, kept in zip(found, known, strict=True)
        ]

    def _keep(self, missing: Sequence[Run], made: list[bytes]) -> list[bytes]:
        with self._changing:
            for run, rendering in zip(missing, made, strict=True):
                self._drop(run.id)
                self._kept[run.id] = run.revision, rendering
                self._used += len(rendering)
            while self._used > self._max_bytes:
                self._drop(next(iter(self._kept)))
        return made

    def _drop(self, run_id: str) -> None:
        kept = self._kept.pop(run_id, None)
        if kept is not None:
            self._used -= len(kept[1])
