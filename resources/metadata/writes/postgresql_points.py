"""Store a run's next point in PostgreSQL by one statement of the event loop.

This is the most frequent write. The group writer reads rows, decides, and writes: for a single request that costs two round
trips and two thread switches. The conditions for appending a point fit into the statement that appends it: the run exists,
is active and belongs to the caller, and the series exists and its newest point is older. If one of them fails, or on any
error, the group writer handles the request and reports the reason: storing a point twice is idempotent.
"""

import asyncio
from typing import Any

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from sqlalchemy import Engine, PoolProxiedConnection
from sqlalchemy.exc import SQLAlchemyError

from resources.metadata.database import is_readable
from resources.metadata.writes.write_decisions import RunWrite

STATEMENT_NAME = b"next_point"
# The run's row is locked before the series', in the same order as group writers do, to avoid deadlocks.
STATEMENT = b"""WITH run AS (
        UPDATE runs SET revision = revision + 1
        WHERE id = $1 AND lifecycle_stage = 'active' AND ($2::text IS NULL OR organization = $2) RETURNING id
    ), series AS (
        UPDATE latest_metrics AS t SET step = $4::bigint, timestamp = $5::bigint, value = $6::float8, is_nan = $7::bool
        FROM run WHERE t.run_id = run.id AND t.key = $3
        AND (t.step, t.timestamp, t.value) < ($4::bigint, $5::bigint, $6::float8) RETURNING t.id
    ), tally AS (
        INSERT INTO call_tallies AS c (id, call, number, taken_at) SELECT $8::text, $9::text, 1, 0 FROM series
        WHERE $8::text IS NOT NULL ON CONFLICT (id) DO UPDATE SET number = c.number + 1
    )
    INSERT INTO metrics (series, step, timestamp, value, is_nan)
    SELECT id, $4::bigint, $5::bigint, $6::float8, $7::bool FROM series"""
STORED = b"INSERT 0 1"


class SinglePointWriter:
    """One connection, one statement at a time, from one event loop; only `close` is thread-safe.

    The loop watches the connection permanently: registering it for each result cost nine system calls.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: _Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._busy = False
        self._closed = False

    async def store(self, write: RunWrite) -> bool:
        """Store a point. Returns whether it was committed; if not, use the group writer."""
        if self._busy or self._closed:
            return False
        self._busy = True
        try:
            if self._connection is None or self._connection.is_lost:
                self._disconnect()
                self._loop = asyncio.get_running_loop()
                self._connection = _Connection(await asyncio.to_thread(self._connect), self._loop)
            return await self._connection.tag(_values(write)) == STORED
        except (SQLAlchemyError, psycopg.Error):
            self._disconnect()
            return False
        except BaseException:
            # Interrupted while a result is pending: the next statement on this connection would receive it.
            self._disconnect()
            raise
        finally:
            self._busy = False
            if self._closed:
                self._disconnect()

    def close(self) -> None:
        """Close the connection in its event loop, after the statement in progress."""
        self._closed = True
        if self._loop is None or self._loop.is_closed():
            self._disconnect_unless_busy()
        else:
            self._loop.call_soon_threadsafe(self._disconnect_unless_busy)

    def _disconnect_unless_busy(self) -> None:
        if not self._busy:
            self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.discard()

    def _connect(self) -> PoolProxiedConnection:
        pooled = self._engine.raw_connection()
        result = _pgconn(pooled).prepare(STATEMENT_NAME, STATEMENT)
        if result.status != ExecStatus.COMMAND_OK:
            pooled.invalidate()
            raise error_from_result(result)
        return pooled


class _Connection:
    """A connection that the loop watches until it is closed.

    If it were closed while watched, the loop could miss events of a later socket with the same number.
    """

    def __init__(self, pooled: PoolProxiedConnection, loop: asyncio.AbstractEventLoop) -> None:
        self._pooled = pooled
        self._pgconn = _pgconn(pooled)
        self._loop = loop
        self._socket: int = self._pgconn.socket
        self._answered: asyncio.Future[None] | None = None
        self._watched = True
        loop.add_reader(self._socket, self._read)

    @property
    def is_lost(self) -> bool:
        """Whether the connection broke while no statement was waiting."""
        return not self._watched

    async def tag(self, values: list[bytes | None]) -> bytes:
        """Execute the statement in its own transaction. Returns PostgreSQL's command tag.

        Raises:
            psycopg.Error: nothing was written, or the connection is lost.
        """
        self._answered = self._loop.create_future()
        self._pgconn.send_query_prepared(STATEMENT_NAME, values)
        if self._pgconn.flush():
            raise psycopg.OperationalError("the connection does not accept a few hundred bytes")
        await self._answered
        tag = b""
        while (result := self._pgconn.get_result()) is not None:
            if result.status != ExecStatus.COMMAND_OK:
                raise error_from_result(result)
            tag = result.command_status
        return tag

    def discard(self) -> None:
        self._unwatch()
        self._pooled.invalidate()

    def _read(self) -> None:
        """Read from the socket: a result, or the end of the connection."""
        answered = self._answered
        try:
            self._pgconn.consume_input()
            # uvloop reports a reset connection only once, even if a last message is still unread. A crashing backend sends
            # one: its end must be read now, or the statement would wait forever.
            while self._pgconn.is_busy() and is_readable(self._socket):
                self._pgconn.consume_input()
        except psycopg.Error as error:
            self._unwatch()
            if answered is not None and not answered.done():
                answered.set_exception(error)
        else:
            if answered is not None and not answered.done() and not self._pgconn.is_busy():
                answered.set_result(None)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket)


def _values(write: RunWrite) -> list[bytes | None]:
    [(key, [(step, timestamp, value, is_nan)])] = write.points.items()
    organization = None if write.organization is None else write.organization.encode()
    number = [repr(part).encode() for part in (step, timestamp, value, is_nan)]
    tally = [part.encode() for part in write.tally] if write.tally else [None, None]
    return [write.run_id.encode(), organization, key.encode(), *number, *tally]


def _pgconn(pooled: PoolProxiedConnection) -> Any:
    driver: Any = pooled.driver_connection
    return driver.pgconn
