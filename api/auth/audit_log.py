"""Write the audit log (rows X4, Q7): each call that changes something, is refused, or opens a dataset.

A training script logs thousands of metrics a minute. A row for each would double the work of the tracker and bury every
other row, and says no more than "this user logged to this run": such calls are put together, with their count. So are calls
without a valid token, which anybody may send as fast as he likes. The first of its kind is in the log within
`FLUSH_SECONDS`, what follows once a minute, and all of it when the server ends.

Whatever has changed something is on record before its answer leaves: a row in the log, or its count in the database
(`resources.metadata.audit_log`), from where the next server takes it to the log if this one is killed. A call that was
refused, or failed, is counted in memory first: of these a killed server loses the last `FLUSH_SECONDS`.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from heapq import nsmallest
from operator import not_
from typing import Any

from msgspec import structs
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope
from tenacity import AsyncRetrying, RetryError, retry_if_result

from api.auth.permissions import Caller
from api.auth.route_matching import Match
from api.routing import Audit
from recipes.storage.retry import every
from resources.metadata import audit_log
from resources.metadata.audit_log import MAX_OBJECTS, AuditedCall, record_calls
from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.ownership import ObjectKind, Reference


@dataclass
class Call:
    """What is known of a call so far, for its audit row."""

    method: str
    route: str
    client: str
    started: float
    audit: Audit = Audit.EACH
    caller: Caller | None = None
    references: frozenset[Reference] = frozenset()
    state: Mapping[str, Any] = field(default_factory=dict)
    is_counted: bool = False
    """Counted in the transaction of what it changed, and so on record already."""

    @property
    def duration_ms(self) -> float:
        """Until now."""
        return round((time.perf_counter() - self.started) * 1000, 3)

    def audit_row(self, status: int, duration_ms: float = 0.0) -> AuditedCall:
        """Without a duration, the kind of call that it is counted as."""
        return AuditedCall(
            user=self.caller.user_id if self.caller else "",
            organization=self.caller.organization if self.caller else "",
            roles=tuple(sorted(self.caller.roles)) if self.caller else (),
            method=self.method,
            route=self.route,
            objects=self._objects(),
            status=status,
            client=self.client,
            duration_ms=duration_ms,
        )

    def _objects(self) -> tuple[str, ...]:
        run_id, dataset_id = self.state.get("run_id"), self.state.get("dataset_id")
        run = (str(Reference(ObjectKind.RUN, str(run_id))),) if run_id else ()
        if dataset_id:  # found by its name
            return (str(Reference(ObjectKind.DATASET, str(dataset_id))),)
        # Each logged metric comes by here, and names its run alone.
        return tuple(nsmallest(MAX_OBJECTS, {*map(str, self.references), *run})) if self.references else run


def begin_call(scope: Scope, match: Match | None) -> Call:
    client = scope["client"][0] if scope.get("client") else ""
    route = match.route.template if match else ""
    return Call(scope["method"], route, client, time.perf_counter(), state=scope["state"])


def begin_websocket(scope: Scope, route: str) -> Call:
    """Describe a websocket's handshake, which is recorded if it is refused.

    Refusals are counted together, because browsers retry.
    """
    client = scope["client"][0] if scope.get("client") else ""
    return Call("WEBSOCKET", route, client, time.perf_counter(), audit=Audit.NOTED)


log = logging.getLogger(__name__)

FLUSH_SECONDS = 3.0
DATABASE_OUTAGE_SECONDS = 60.0
RETRY_SECONDS = 0.2
MAX_DISTINCT_CALLS = 10_000


class AuditLog:
    """Records calls. Loses none that has changed something; others as its module says. `now` in milliseconds."""

    def __init__(self, database: Database, now: Callable[[], int] = now_ms) -> None:
        self._database = database
        self._now = now
        self._counts: Counter[AuditedCall] = Counter()
        self._waiting: list[tuple[AuditedCall, bool, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def record_call(self, call: Call, status: int) -> None:
        """Record a call that is answered with a status, as its route declares."""
        counted = call.audit is Audit.COUNTED
        if call.is_counted:
            return
        # What failed changed nothing, often for want of a database: its answer does not wait until it is on record.
        noted = call.audit is Audit.NOTED or status >= 500 or (counted and status >= 400)
        if call.caller is None or noted:
            self.count(call.audit_row(status))
        else:
            await self.record(call.audit_row(status, call.duration_ms), counted=counted)

    async def record(self, call: AuditedCall, *, counted: bool = False) -> None:
        """Write a call now, or count it now. Returns when that is committed: with it, in one transaction, what came in
        meanwhile."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((call, counted, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_waiting())
        await done

    async def _write_waiting(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            each = [call for call, counted, _ in group if not counted]
            tallied = [call for call, counted, _ in group if counted]
            try:
                await self._write_with_retries(each, tallied)
            finally:
                for _, _, done in group:
                    if not done.done():
                        done.set_result(None)

    async def _write_with_retries(self, each: Sequence[AuditedCall], counted: Sequence[AuditedCall]) -> None:
        """Write calls that have changed something, also through a restart of the database: their answers wait for it."""
        retrying = AsyncRetrying(retry=retry_if_result(not_), **every(RETRY_SECONDS, DATABASE_OUTAGE_SECONDS))
        try:
            await retrying(run_in_threadpool, self._write, each, counted)
        except RetryError:
            # They have happened and their answers are true: the log of the server keeps what the database could not.
            log.error("audit rows could not be written: %s", [*each, *counted])

    def count(self, call: AuditedCall) -> None:
        """Add a call that changed nothing to its equals, to be written soon."""
        if call not in self._counts and len(self._counts) >= MAX_DISTINCT_CALLS:
            # Whoever forges this many different calls is told apart no longer.
            call = structs.replace(call, client="", objects=())
        self._counts[call] += 1

    async def flush(self, everything: bool = False) -> None:
        """Write what was counted, and put the counts that are due into the log. What cannot be written now is kept."""
        counts, self._counts = self._counts, Counter()
        counted = [structs.replace(call, count=number) for call, number in counts.items()]
        if await run_in_threadpool(self._write_counts, counted, 0 if everything else audit_log.FLUSH_PERIOD_MS):
            return
        if everything and counted:
            log.error("audit rows could not be written: %s", counted)
        self._counts.update(counts)

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

    def _write(self, each: Sequence[AuditedCall], counted: Sequence[AuditedCall]) -> bool:
        try:
            with self._database.write() as connection:
                record_calls(connection, each)
                audit_log.count_calls(connection, counted)
        except SQLAlchemyError as error:
            log.warning("audit rows cannot be written now: %s", type(error).__name__)
            return False
        return True

    def _write_counts(self, counted: Sequence[AuditedCall], period: int) -> bool:
        try:
            if not counted and not audit_log.is_flush_due(self._database, self._now(), period):
                return True
            with self._database.write() as connection:
                audit_log.count_calls(connection, counted)
                record_calls(connection, audit_log.flush_counts(connection, self._now(), period))
        except SQLAlchemyError as error:
            log.warning("audit rows cannot be written now: %s", type(error).__name__)
            return False
        return True
