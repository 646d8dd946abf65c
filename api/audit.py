"""Writing the audit log (rows X4, Q7): one row for each call that changes something, is refused, or opens a dataset, with
sign-in and without.

A training script logs thousands of metrics a minute. A row for each would double the work of the tracker and bury every
other row, and says no more than "this user logged to this run": such calls are put together, with their count. So are calls
without a valid token, which anybody may send as fast as he likes. The first of its kind is written within `FLUSH_SECONDS`,
what follows once a minute, and all of it when the server ends; killed, it loses the count of a minute at most.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from resources.metadata.audit import AuditedCall, record
from resources.metadata.database import Database

log = logging.getLogger(__name__)

FLUSH_SECONDS = 3.0
PERIOD_SECONDS = 60.0
MAX_TALLIES = 10_000


@dataclass
class Tally:
    """Equal calls since `written_at`."""

    call: AuditedCall
    written_at: float


class AuditTrail:
    """Records calls. Loses none that it was given unless the process is killed or the database stays away."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._tallies: dict[AuditedCall, Tally] = {}
        self._waiting: list[tuple[AuditedCall, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def record(self, call: AuditedCall) -> None:
        """Write a call now. Returns when it is committed: with it, in one transaction, what came in meanwhile."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((call, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_waiting())
        await done

    async def _write_waiting(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            try:
                await run_in_threadpool(self._write, [call for call, _ in group])
            finally:
                for _, done in group:
                    if not done.done():
                        done.set_result(None)

    def count(self, call: AuditedCall) -> None:
        """Add a call to its equals."""
        kind = replace(call, duration_ms=0.0, count=0)
        tally = self._tallies.get(kind)
        if tally is None:
            if len(self._tallies) >= MAX_TALLIES:  # whoever forges this many different calls is told apart no longer
                kind = replace(kind, client="", objects=())
            tally = self._tallies.setdefault(kind, Tally(kind, float("-inf")))
        duration = tally.call.duration_ms + call.duration_ms
        tally.call = replace(tally.call, count=tally.call.count + call.count, duration_ms=duration)

    async def flush(self, everything: bool = False) -> None:
        """Write the counts that are due."""
        if due := self._take_due(everything):
            await run_in_threadpool(self._write, due)

    def _take_due(self, everything: bool) -> list[AuditedCall]:
        """The counts to write, each taken once: runs in the event loop, as `count` does. Forgets what came no more."""
        now = self._clock()
        due: list[AuditedCall] = []
        for kind, tally in list(self._tallies.items()):
            if not everything and now - tally.written_at < PERIOD_SECONDS:
                continue
            if tally.call.count == 0:
                del self._tallies[kind]
                continue
            due.append(tally.call)
            tally.call, tally.written_at = kind, now
        return due

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Flush from time to time, and at the end."""
        flusher = asyncio.create_task(self._flush_forever())
        try:
            yield
        finally:
            flusher.cancel()
            with suppress(asyncio.CancelledError):
                await flusher
            await self.flush(everything=True)

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self.flush()

    def _write(self, calls: list[AuditedCall]) -> None:
        try:
            with self._database.write() as connection:
                record(connection, calls)
        except SQLAlchemyError as error:
            # The call has happened and its answer is true: the log of the server keeps what the database could not.
            log.error("audit rows could not be written (%s): %s", type(error).__name__, calls)
