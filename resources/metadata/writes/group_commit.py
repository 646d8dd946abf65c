"""One thread that stores what requests log: those that come in together share a transaction, and each is answered after its
commit.

One commit for many requests is what makes logging fast; the rules are those of `run_groups`. Nothing is kept
between transactions, because other processes write to the same database. A point that comes in while nothing else does
goes a shorter way (`next_points_postgresql`, `next_points_sqlite`).
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from sqlalchemy import PoolProxiedConnection
from sqlalchemy.exc import DataError, IntegrityError, OperationalError

from resources.errors import ErrorCode, HanzoError
from resources.metadata.database import Database
from resources.metadata.transactions import driver_errors
from resources.metadata.writes.run_groups import write_group
from resources.metadata.writes.run_writes import RunWrite

log = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Requests that may wait at once; the next ones wait before their bodies are read."""
MAX_GROUP = 10_000
"""Metrics, params and tags in one transaction: about a tenth of a second."""
ATTEMPTS = 3
DEADLOCK = "40P01"


class Waiting(NamedTuple):
    write: RunWrite
    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[None]"


class NextPoints(Protocol):
    """The shorter way of a database."""

    async def store(self, write: RunWrite) -> bool: ...

    def close(self) -> None: ...


class RunWriter:
    """Give it writes from one event loop. Its thread starts with the first of them and ends with `close`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pooled: PoolProxiedConnection | None = None
        self._closed = False
        self._unanswered = 0
        self._next_points = next_points_of(database)
        self.room = asyncio.Semaphore(MAX_WAITING)
        """Held by each request from when its body is there until it is answered."""
        self.arriving = asyncio.Semaphore(MAX_WAITING)
        """Held beside it by those whose body comes in parts, from its first part on."""

    async def store(self, write: RunWrite) -> None:
        """Returns once the write is committed.

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
            await self._in_group(write)
        finally:
            self._unanswered -= 1

    async def _in_group(self, write: RunWrite) -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        self._queue.put(Waiting(write, loop, answer))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(loop,), name="run-writer", daemon=True)
            self._thread.start()
        await answer

    def close(self) -> None:
        """Store what waits, then end the thread. Later writes are refused."""
        self._closed = True
        self._next_points.close()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        group: list[Waiting] = []
        try:
            while group := self._next_group():
                answers = self._commit([waiting.write for waiting in group])
                loop.call_soon_threadsafe(_answer, group, answers)
        finally:
            if self._pooled is not None:
                self._pooled.close()
                self._pooled = None
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._ended, group)

    def _ended(self, group: Sequence[Waiting]) -> None:
        """Refuse what the thread left behind: the group that it died of, and what waits.

        In the event loop, where writes are queued, so that none is queued between this and the next thread.
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

    def _next_group(self) -> list[Waiting]:
        """What waits, as far as one transaction should carry it; empty when it is time to end."""
        group: list[Waiting] = []
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
        """Store a group. When the database refuses it, each write is tried alone, so that only the cause is refused."""
        for attempt in range(ATTEMPTS):
            try:
                return self._transaction(writes)
            except (DataError, IntegrityError) as error:
                if len(writes) == 1:
                    return [error]
                return [answer for write in writes for answer in self._commit([write])]
            except OperationalError as error:
                if getattr(error.orig, "sqlstate", None) != DEADLOCK or attempt == ATTEMPTS - 1:
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
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Whatever happened to the connection, the next transaction has another one."""
        pooled, self._pooled = self._pooled, None
        if pooled is not None:
            # Closing is not enough: SQLite holds its lock until the last statement is forgotten, which an error remembers.
            with suppress(Exception):
                pooled.rollback()
            pooled.invalidate()


def _answer(group: Sequence[Waiting], answers: Sequence[Exception | None]) -> None:
    for waiting, error in zip(group, answers, strict=True):
        if waiting.answer.done():
            continue
        if error is None:
            waiting.answer.set_result(None)
        else:
            waiting.answer.set_exception(error)


def next_points_of(database: Database) -> NextPoints:
    """The shorter way for a point that is alone. The database's driver is loaded only where it is used."""
    if database.engine.dialect.name == "postgresql":
        from resources.metadata.writes import single_point_postgresql

        return single_point_postgresql.NextPoints(database.engine)
    from resources.metadata.writes import single_point_sqlite

    return single_point_sqlite.NextPoints(database.engine)


def _shutting_down() -> HanzoError:
    return HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, "The server is shutting down: try again later")
