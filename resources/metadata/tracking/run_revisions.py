"""A run's revision moves with all that the run logs, in the same transaction: so what was made of that can be kept.

What belongs here: the revision, and what is kept by it. What does not: a run's own columns, which do not move it.
"""

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence

from sqlalchemy import Connection, Table, func, select, update

from resources.metadata.tables import runs
from resources.metadata.tracking.run_states import Run

CACHE_BYTES = 32 << 20
"""Bytes that are kept: what about twenty thousand runs of ten metrics and ten params logged."""


def new_revision() -> int:
    """Of a new run. Drawn, so that none comes again with the id of a run that was there before the store was emptied."""
    return secrets.randbits(62)


def bump_revision(writer: Connection, run_id: str) -> None:
    """Whoever changes what a run logged calls this, before it changes rows of other tables: it locks the run's row."""
    writer.execute(update(runs).where(runs.c.id == run_id).values(revision=runs.c.revision + 1))


def next_position(writer: Connection, table: Table, run_id: str) -> int:
    """The place after those that a run has in a table that keeps the order of what it logged. Its row must be locked."""
    last = select(func.max(table.c.place)).where(table.c.run_id == run_id)
    place: int | None = writer.execute(last).scalar_one()
    return 0 if place is None else place + 1


class RenderingCache:
    """What was made of runs' logs, each for as long as its run has the same revision; the oldest go when there is no room.

    A run's row is read before its logs, so that these may be newer than its revision, and are made anew next time, but never
    older. Several threads share it.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._kept: dict[str, tuple[int, bytes]] = {}
        self._changing = threading.Lock()

    def get_or_render(self, found: Sequence[Run], make: Callable[[Sequence[Run]], Iterable[bytes]]) -> list[bytes]:
        """For each run, in their order, what `make` makes of it, or has made before."""
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
