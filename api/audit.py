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
from dataclasses import dataclass

from msgspec import structs
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from resources.metadata.audit import AuditedCall, record
from resources.metadata.database import Database

log = logging.getLogger(__name__)

FLUSH_SECONDS = 3.0
PATIENCE_SECONDS = 60.0
RETRY_SECONDS = 0.2
PERIOD_SECONDS = 60.0
MAX_TALLIES = 10_000


@dataclass
class Tally:
    """Equal calls since `written_at`."""

    written_at: float
    count: int = 0
    duration_ms: float = 0.0


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
                await self._write_patiently([call for call, _ in group])
            finally:
                for _, done in group:
                    if not done.done():
                        done.set_result(None)

    async def _write_patiently(self, calls: list[AuditedCall]) -> None:
        """Write calls that have changed something, also through a restart of the database: their answers wait for it."""
        end = self._clock() + PATIENCE_SECONDS
        while not await run_in_threadpool(self._write, calls):
            if self._clock() > end:
                # They have happened and their answers are true: the log of the server keeps what the database could not.
                log.error("audit rows could not be written: %s", calls)
                return
            await asyncio.sleep(RETRY_SECONDS)

    def count(self, call: AuditedCall) -> None:
        """Add a call to its equals."""
        kind = structs.replace(call, duration_ms=0.0, count=0)
        tally = self._tallies.get(kind)
        if tally is None:
            if len(self._tallies) >= MAX_TALLIES:  # whoever forges this many different calls is told apart no longer
                kind = structs.replace(kind, client="", objects=())
            tally = self._tallies.setdefault(kind, Tally(float("-inf")))
        tally.count += call.count
        tally.duration_ms += call.duration_ms

    async def flush(self, everything: bool = False) -> None:
        """Write the counts that are due. What the database does not take now is due again."""
        due = self._take_due(everything)
        if not due or await run_in_threadpool(self._write, due):
            return
        if everything:
            log.error("audit rows could not be written: %s", due)
        for call in due:
            self.count(call)

    def _take_due(self, everything: bool) -> list[AuditedCall]:
        """The counts to write, each taken once: runs in the event loop, as `count` does. Forgets what came no more."""
        now = self._clock()
        due: list[AuditedCall] = []
        for kind, tally in list(self._tallies.items()):
            if not everything and now - tally.written_at < PERIOD_SECONDS:
                continue
            if tally.count == 0:
                del self._tallies[kind]
                continue
            due.append(structs.replace(kind, count=tally.count, duration_ms=tally.duration_ms))
            tally.count, tally.duration_ms, tally.written_at = 0, 0.0, now
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

    def _write(self, calls: list[AuditedCall]) -> bool:
        try:
            with self._database.write() as connection:
                record(connection, calls)
        except SQLAlchemyError as error:
            log.warning("audit rows cannot be written now: %s", type(error).__name__)
            return False
        return True
