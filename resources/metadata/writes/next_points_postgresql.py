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

from resources.metadata.writes.run_writes import RunWrite

NAME = b"next_point"
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


class NextPoints:
    """One connection, one statement at a time, all from one event loop; only `close` may be called from elsewhere."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pooled: PoolProxiedConnection | None = None
        self._busy = False
        self._closed = False

    async def store(self, write: RunWrite) -> bool:
        """Whether the point is committed. Where it is not, nothing is known of it: ask the group writer."""
        if self._busy or self._closed:
            return False
        self._busy = True
        try:
            if self._pooled is None:
                self._pooled = await asyncio.to_thread(self._connect)
            return await _tag(self._pooled, _values(write)) == STORED
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
        """A statement that is under way ends first."""
        self._closed = True
        if not self._busy:
            self._disconnect()

    def _disconnect(self) -> None:
        pooled, self._pooled = self._pooled, None
        if pooled is not None:
            pooled.invalidate()

    def _connect(self) -> PoolProxiedConnection:
        pooled = self._engine.raw_connection()
        result = _pgconn(pooled).prepare(NAME, STATEMENT)
        if result.status != ExecStatus.COMMAND_OK:
            pooled.invalidate()
            raise error_from_result(result)
        return pooled


def _values(write: RunWrite) -> list[bytes | None]:
    [(key, [(step, timestamp, value, is_nan)])] = write.points.items()
    organization = None if write.organization is None else write.organization.encode()
    number = [repr(part).encode() for part in (step, timestamp, value, is_nan)]
    tally = [part.encode() for part in write.tally] if write.tally else [None, None]
    return [write.run_id.encode(), organization, key.encode(), *number, *tally]


async def _tag(pooled: PoolProxiedConnection, values: list[bytes | None]) -> bytes:
    """Execute the statement in a transaction of its own. Returns what PostgreSQL says that it did.

    Raises:
        psycopg.Error: it did nothing, or the connection is lost.
    """
    pgconn = _pgconn(pooled)
    pgconn.send_query_prepared(NAME, values)
    if pgconn.flush():
        raise psycopg.OperationalError("the connection does not take a few hundred bytes")
    tag = b""
    while True:
        while pgconn.is_busy():
            await _readable(pgconn.socket)
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:
            return tag
        if result.status != ExecStatus.COMMAND_OK:
            raise error_from_result(result)
        tag = result.command_status


async def _readable(socket: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(socket, wake)
    try:
        await ready
    finally:
        loop.remove_reader(socket)


def _pgconn(pooled: PoolProxiedConnection) -> Any:
    driver: Any = pooled.driver_connection
    return driver.pgconn
