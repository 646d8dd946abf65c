"""Write the audit log: calls that change something, are refused, or open a dataset.

A training script logs thousands of metrics a minute. A row for each would double the work of the tracker and bury all
other rows, without saying more than "this user logged to this run": such calls are aggregated with their count. So are
calls without a valid token, which anyone can send at any rate. The first of its kind is written within `FLUSH_SECONDS`,
later ones once a minute, and all of them when the server ends.

A change is recorded before its response is sent: as a row in the log, or as a count in the database
(`resources.metadata.audit_log`), from which the next server writes it to the log if this one is killed. Refused and failed
calls are counted in memory first: a killed server loses those of the last `FLUSH_SECONDS`.
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
    """The data of one call for its audit row, collected while it is handled."""

    method: str
    route: str
    client: str
    started: float
    audit: Audit = Audit.EACH
    caller: Caller | None = None
    references: frozenset[Reference] = frozenset()
    state: Mapping[str, Any] = field(default_factory=dict)
    is_counted: bool = False
    """Already recorded: counted in the transaction of its change."""

    @property
    def duration_ms(self) -> float:
        """Milliseconds since the call started."""
        return round((time.perf_counter() - self.started) * 1000, 3)

    def audit_row(self, status: int, duration_ms: float = 0.0) -> AuditedCall:
        """Build the row; without a duration, equal calls have equal rows and can be counted."""
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
        if dataset_id:  # looked up by its name
            return (str(Reference(ObjectKind.DATASET, str(dataset_id))),)
        # Fast path: every logged metric comes here, and names only its run.
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
    """Records calls; loses none that changed something (others: see the module). `now` in milliseconds."""

    def __init__(self, database: Database, now: Callable[[], int] = now_ms) -> None:
        self._database = database
        self._now = now
        self._counts: Counter[AuditedCall] = Counter()
        self._waiting: list[tuple[AuditedCall, bool, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def record_call(self, call: Call, status: int) -> None:
        """Record an answered call as its route declares."""
        counted = call.audit is Audit.COUNTED
        if call.is_counted:
            return
        # A 5xx changed nothing, and is often caused by an unavailable database: its response does not wait for the record.
        noted = call.audit is Audit.NOTED or status >= 500 or (counted and status >= 400)
        if call.caller is None or noted:
            self.count(call.audit_row(status))
        else:
            await self.record(call.audit_row(status, call.duration_ms), counted=counted)

    async def record(self, call: AuditedCall, *, counted: bool = False) -> None:
        """Write or count a call, and return once it is committed.

        Concurrent calls share one transaction.
        """
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
        """Write calls that changed something, retrying while the database restarts: their responses wait."""
        retrying = AsyncRetrying(retry=retry_if_result(not_), **every(RETRY_SECONDS, DATABASE_OUTAGE_SECONDS))
        try:
            await retrying(run_in_threadpool, self._write, each, counted)
        except RetryError:
            # The calls have happened: log them to the server's log instead.
            log.error("audit rows could not be written: %s", [*each, *counted])

    def count(self, call: AuditedCall) -> None:
        """Count a call that changed nothing; written with the next flush."""
        if call not in self._counts and len(self._counts) >= MAX_DISTINCT_CALLS:
            # With this many distinct calls, likely forged, stop distinguishing clients and objects.
            call = structs.replace(call, client="", objects=())
        self._counts[call] += 1

    async def flush(self, everything: bool = False) -> None:
        """Write the counts, and move due ones to the log.

        Counts that cannot be written are kept for the next flush.
        """
        counts, self._counts = self._counts, Counter()
        counted = [structs.replace(call, count=number) for call, number in counts.items()]
        if await run_in_threadpool(self._write_counts, counted, 0 if everything else audit_log.FLUSH_PERIOD_MS):
            return
        if everything and counted:
            log.error("audit rows could not be written: %s", counted)
        self._counts.update(counts)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Flush periodically, and once at the end."""
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
