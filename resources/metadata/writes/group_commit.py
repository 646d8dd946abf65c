"""Group commit: one thread stores concurrent log requests in one transaction."""

import asyncio
import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from sqlalchemy import Dialect, PoolProxiedConnection
from sqlalchemy.exc import DataError, IntegrityError, OperationalError

from resources.errors import ErrorCode, HanzoError
from resources.metadata.database import Database
from resources.metadata.transactions import driver_errors
from resources.metadata.writes import sqlite
from resources.metadata.writes.write_decisions import Changes, KnownRows, RunWrite, WantedRows, decide_writes, wanted_rows

# A group of writes in one transaction: read the required rows, decide which writes are accepted, and write the changes.


class RunRows(Protocol):
    """The functions by which a kind of database reads and writes the rows of runs."""

    def begin(self, pooled: PoolProxiedConnection) -> None: ...

    def read(self, pooled: PoolProxiedConnection, wanted: WantedRows) -> KnownRows: ...

    def write(self, pooled: PoolProxiedConnection, known: KnownRows, changes: Changes, commit: bool) -> None: ...


def write_group(
    pooled: PoolProxiedConnection, dialect: Dialect, writes: Sequence[RunWrite], *, whole_transaction: bool = False
) -> list[HanzoError | None]:
    """Store the writes in the connection's transaction, or in a new one.

    Returns for each write why it was refused, or None. A refused write does not affect the others.
    """
    rows = _rows_module(dialect)
    with driver_errors(dialect):
        if whole_transaction:
            rows.begin(pooled)
        known = rows.read(pooled, wanted_rows(writes))
        decision = decide_writes(writes, known)
        rows.write(pooled, known, decision.changes, commit=whole_transaction)
    return decision.refusals


def _rows_module(dialect: Dialect) -> RunRows:
    """Return the module for the dialect; its driver is loaded only when needed."""
    if dialect.name != "postgresql":
        return sqlite
    from resources.metadata.writes import postgresql_batches

    return postgresql_batches


# One thread that stores what requests log: concurrent requests share a transaction, and are answered after its commit.
#
# One commit for many requests is what makes logging fast; the rules are in `write_decisions`. Nothing is cached between
# transactions, because other processes write to the same database. A point that arrives while the writer is idle takes a
# shortcut (`SinglePointWriter` of `postgresql_points` and of `sqlite`).

log = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Maximum number of requests waiting at once; further ones wait before their bodies are read."""
MAX_GROUP = 10_000
"""Maximum number of metrics, params and tags in one transaction: about a tenth of a second."""
MAX_ATTEMPTS = 3
DEADLOCK = "40P01"


class WaitingWrite(NamedTuple):
    write: RunWrite
    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[None]"


class SinglePointStore(Protocol):
    """The shortcut for single points."""

    async def store(self, write: RunWrite) -> bool: ...

    def close(self) -> None: ...


class RunWriter:
    """Accepts writes from one event loop; its thread runs from the first write until `close`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue: queue.SimpleQueue[WaitingWrite | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pooled: PoolProxiedConnection | None = None
        self._closed = False
        self._unanswered = 0
        self._next_points = open_single_point_writer(database)
        self.slots = asyncio.Semaphore(MAX_WAITING)
        """Held by each request from the end of its body to its answer."""
        self.arriving = asyncio.Semaphore(MAX_WAITING)
        """Also held, from the first part on, by requests whose body arrives in parts."""

    async def store(self, write: RunWrite) -> None:
        """Store a write; returns after its commit.

        Raises:
            HanzoError: it was refused, or the server is shutting down: nothing of it is stored.
            SQLAlchemyError: the database failed.
        """
        if self._unanswered == 0 and write.is_point and await self._next_points.store(write):
            return
        if self._closed:
            raise _shutting_down()
        self._unanswered += 1
        try:
            await self._enqueue(write)
        finally:
            self._unanswered -= 1

    async def _enqueue(self, write: RunWrite) -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        self._queue.put(WaitingWrite(write, loop, answer))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(loop,), name="run-writer", daemon=True)
            self._thread.start()
        await answer

    def close(self) -> None:
        """Store waiting writes, then end the thread. Later writes are refused."""
        self._closed = True
        self._next_points.close()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        group: list[WaitingWrite] = []
        try:
            while group := self._next_group():
                answers = self._commit([waiting.write for waiting in group])
                loop.call_soon_threadsafe(_answer, group, answers)
        finally:
            if self._pooled is not None:
                self._pooled.close()
                self._pooled = None
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._refuse_remaining, group)

    def _refuse_remaining(self, group: Sequence[WaitingWrite]) -> None:
        """Refuse the writes that the thread left behind: its failed group, and the queue.

        Runs in the event loop, where writes are queued, so that none is queued between this and the next thread.
        """
        self._thread = None
        _answer(group, [_shutting_down()] * len(group))
        while True:
            try:
                waiting = self._queue.get_nowait()
            except queue.Empty:
                return
            if waiting is not None:
                _answer([waiting], [_shutting_down()])

    def _next_group(self) -> list[WaitingWrite]:
        """Return waiting writes for one transaction; empty when the thread must end."""
        group: list[WaitingWrite] = []
        size = 0
        waiting = self._queue.get()
        while waiting is not None:
            group.append(waiting)
            size += waiting.write.size
            if size >= MAX_GROUP:
                return group
            try:
                waiting = self._queue.get_nowait()
            except queue.Empty:
                return group
        if group:
            self._queue.put(None)
        return group

    def _commit(self, writes: Sequence[RunWrite]) -> Sequence[Exception | None]:
        """Store a group; on bad data, retry each write alone to isolate the cause."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                return self._transaction(writes)
            except (DataError, IntegrityError) as error:
                if len(writes) == 1:
                    return [error]
                return [answer for write in writes for answer in self._commit([write])]
            except OperationalError as error:
                if getattr(error.orig, "sqlstate", None) != DEADLOCK or attempt == MAX_ATTEMPTS - 1:
                    return [error] * len(writes)
            except Exception as error:
                log.exception("a group of %d writes failed", len(writes))
                return [error] * len(writes)
        raise AssertionError("every attempt returns or is followed by another")

    def _transaction(self, writes: Sequence[RunWrite]) -> Sequence[HanzoError | None]:
        engine = self._database.engine
        if self._pooled is None:
            with driver_errors(engine.dialect):
                self._pooled = engine.raw_connection()
        try:
            return write_group(self._pooled, engine.dialect, writes, whole_transaction=True)
        except BaseException:
            self._discard_connection()
            raise

    def _discard_connection(self) -> None:
        """Discard the connection after any error, so that the next transaction opens another."""
        pooled, self._pooled = self._pooled, None
        if pooled is not None:
            # Closing is not enough: SQLite holds its lock until the last statement is freed, to which an error holds a
            # reference.
            with suppress(Exception):
                pooled.rollback()
            pooled.invalidate()


def _answer(group: Sequence[WaitingWrite], answers: Sequence[Exception | None]) -> None:
    for waiting, error in zip(group, answers, strict=True):
        if waiting.answer.done():
            continue
        if error is None:
            waiting.answer.set_result(None)
        else:
            waiting.answer.set_exception(error)


def open_single_point_writer(database: Database) -> SinglePointStore:
    """Open the shortcut for single points; the driver is loaded only when needed."""
    if database.engine.dialect.name == "postgresql":
        from resources.metadata.writes import postgresql_points

        return postgresql_points.SinglePointWriter(database.engine)
    from resources.metadata.writes import sqlite

    return sqlite.SinglePointWriter(database.engine)


def _shutting_down() -> HanzoError:
    return HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, "The server is shutting down: try again later")
