"""A run's next point in PostgreSQL, the commonest write of all: one statement, awaited by the event loop itself.

The group writer asks for rows, decides, and writes: for a request that is alone that is two answers to wait for, and two
changes of thread. Whether a point may be added behind its series can be said in the statement that adds it: the run is
there, active and the caller's, and the series is there and its newest point older. Where one of them is not so, or anything
goes wrong, the group writer takes the request up and says why: a point that it sends once more is stored once.
"""

import asyncio
from typing import Any

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from sqlalchemy import Engine, PoolProxiedConnection
from sqlalchemy.exc import SQLAlchemyError

from resources.metadata.writes.write_decisions import RunWrite

STATEMENT_NAME = b"next_point"
# The run's row is locked before the series', as group writers do: neither waits for the other while it holds what it wants.
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
    """One connection, one statement at a time, all from one event loop; only `close` may be called from elsewhere.

    The loop watches the connection for as long as there is one: to ask it for each answer anew took nine system calls.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: _Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._busy = False
        self._closed = False

    async def store(self, write: RunWrite) -> bool:
        """Whether the point is committed. Where it is not, nothing is known of it: ask the group writer."""
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
            # Left in the middle of an answer, a connection would give it to the next one who asks.
            self._disconnect()
            raise
        finally:
            self._busy = False
            if self._closed:
                self._disconnect()

    def close(self) -> None:
        """A statement that is under way ends first. The connection is let go of by the loop that watches it."""
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
    """Watched by the loop, and never closed while it is: the loop would miss whatever has the same number next."""

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
        """It broke while nobody waited for an answer."""
        return not self._watched

    async def tag(self, values: list[bytes | None]) -> bytes:
        """Execute the statement in a transaction of its own. Returns what PostgreSQL says that it did.

        Raises:
            psycopg.Error: it did nothing, or the connection is lost.
        """
        self._answered = self._loop.create_future()
        self._pgconn.send_query_prepared(STATEMENT_NAME, values)
        if self._pgconn.flush():
            raise psycopg.OperationalError("the connection does not take a few hundred bytes")
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
        """Called when there is something to read: an answer, or the end of the connection."""
        answered = self._answered
        try:
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
