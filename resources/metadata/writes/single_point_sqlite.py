"""A run's next point in SQLite, the commonest write of all: stored by the event loop itself, which changes no thread for it.

The short way of `next_points_postgresql`, with its rule: what it does not store is the group writer's. The event loop serves
others too, so it waits neither for another writer's lock nor for a checkpoint: what is committed stands in the write-ahead
log, where it survives the death of any process, until a commit of somebody else moves it into the database.
"""

import asyncio
import sqlite3
from typing import Any

from sqlalchemy import Engine, PoolProxiedConnection
from sqlalchemy.exc import SQLAlchemyError

from resources.metadata.writes.run_writes import RunWrite

CHECKPOINT_INTERVAL = 160
"""One of so many points is the group writer's, whose commit checkpoints a log of 1,000 pages: a point writes about six."""

_SERIES = """UPDATE latest_metrics SET step = ?1, timestamp = ?2, value = ?3, is_nan = ?4
    WHERE run_id = ?5 AND key = ?6 AND (step, timestamp, value) < (?1, ?2, ?3) AND EXISTS (
        SELECT 1 FROM runs WHERE id = ?5 AND lifecycle_stage = 'active' AND (?7 IS NULL OR organization = ?7)
    ) RETURNING id"""
_POINT = "INSERT INTO metrics (series, step, timestamp, value, is_nan) VALUES (?, ?, ?, ?, ?)"
_TALLY = """INSERT INTO call_tallies (id, call, number, taken_at) VALUES (?, ?, 1, 0)
    ON CONFLICT (id) DO UPDATE SET number = number + 1"""
_REVISED = "UPDATE runs SET revision = revision + 1 WHERE id = ?"


class SinglePointWriter:
    """One connection, all from one event loop; only `close` may be called from elsewhere, when that loop stores no more."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pooled: PoolProxiedConnection | None = None
        self._connecting = False
        self._closed = False
        self._attempts = 0

    async def store(self, write: RunWrite) -> bool:
        """Whether the point is committed. Where it is not, nothing of it is stored: ask the group writer."""
        if self._closed or self._connecting:
            return False
        self._attempts += 1
        if self._attempts % CHECKPOINT_INTERVAL == 0:
            return False
        try:
            if self._pooled is None:
                self._connecting = True
                try:
                    self._pooled = await asyncio.to_thread(self._connect)
                finally:
                    self._connecting = False
            return _store(self._pooled.driver_connection, write)
        except (SQLAlchemyError, sqlite3.Error) as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY:
                self._disconnect()
            return False

    def close(self) -> None:
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        pooled, self._pooled = self._pooled, None
        if pooled is not None:
            pooled.invalidate()

    def _connect(self) -> PoolProxiedConnection:
        pooled = self._engine.raw_connection()
        driver: Any = pooled.driver_connection
        driver.execute("PRAGMA busy_timeout=0")
        driver.execute("PRAGMA wal_autocheckpoint=0")
        return pooled


def _store(driver: Any, write: RunWrite) -> bool:
    """Store the point in a transaction of its own.

    Raises:
        sqlite3.Error: nothing is stored; another writer's lock is one reason.
    """
    [(key, [(step, timestamp, value, is_nan)])] = write.points.items()
    cursor: sqlite3.Cursor = driver.cursor()
    cursor.execute("BEGIN IMMEDIATE")
    try:
        series_values = (step, timestamp, value, is_nan, write.run_id, key, write.organization)
        [series] = cursor.execute(_SERIES, series_values).fetchone() or [None]
        if series is None:
            cursor.execute("ROLLBACK")
            return False
        cursor.execute(_POINT, (series, step, timestamp, value, is_nan))
        cursor.execute(_REVISED, (write.run_id,))
        if write.tally:
            cursor.execute(_TALLY, write.tally)
        cursor.execute("COMMIT")
    except BaseException:
        driver.rollback()
        raise
    return True
