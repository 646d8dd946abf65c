"""Write logged rows to SQLite: batches of many rows, and single points."""

import asyncio
import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import msgspec
from sqlalchemy import Engine, PoolProxiedConnection
from sqlalchemy.exc import SQLAlchemyError

from resources.metadata.writes.write_decisions import Changes, Key, KnownRows, RunRow, RunWrite, Series, Value, WantedRows

# Batches: few statements with many rows each.
#
# Python releases its lock at every statement and waits for it again, up to 5 ms while the event loop is busy: with one
# statement per row, a group's duration would grow with its rows.

ROWS = (1000, 100, 10, 1)
"""Rows per INSERT: few distinct statements, which SQLite prepares once, and none above its 32,766 variables."""

_RUNS = "SELECT id, lifecycle_stage, organization FROM runs WHERE id IN (SELECT value FROM json_each(?))"
_PARAMS = """SELECT t.run_id, t.key, t.value FROM json_each(?) AS wanted CROSS JOIN params AS t
    ON t.run_id = wanted.value ->> 0 AND t.key = wanted.value ->> 1"""
_SERIES = """SELECT t.run_id, t.key, t.id, t.step, t.timestamp, t.value, t.is_nan
    FROM json_each(?) AS wanted CROSS JOIN latest_metrics AS t
    ON t.run_id = wanted.value ->> 0 AND t.key = wanted.value ->> 1"""
_NEWEST = (
    "INSERT INTO latest_metrics (run_id, key, step, timestamp, value, is_nan) VALUES ",
    """ ON CONFLICT (run_id, key) DO UPDATE SET step = excluded.step, timestamp = excluded.timestamp,
    value = excluded.value, is_nan = excluded.is_nan RETURNING run_id, key, id""",
)
# A quarter faster than ON CONFLICT, and than a plain INSERT, for which SQLite records how to undo the statement.
_POINTS = ("INSERT OR IGNORE INTO metrics (series, step, timestamp, value, is_nan) VALUES ", "")
_NEW_PARAMS = ("INSERT INTO params (run_id, key, value) VALUES ", "")
_TAGS = (
    "INSERT INTO run_tags (run_id, key, value) VALUES ",
    " ON CONFLICT (run_id, key) DO UPDATE SET value = excluded.value",
)
_TALLIES = (
    "INSERT INTO call_tallies (id, call, number, taken_at) VALUES ",
    " ON CONFLICT (id) DO UPDATE SET number = number + excluded.number",
)
_REVISE_RUNS = "UPDATE runs SET revision = revision + 1 WHERE id IN (SELECT value FROM json_each(?))"
_NAME = "UPDATE runs SET name = ? WHERE id = ?"


def begin(pooled: PoolProxiedConnection) -> None:
    _cursor(pooled).execute("BEGIN IMMEDIATE")


def read(pooled: PoolProxiedConnection, wanted: WantedRows) -> KnownRows:
    """Return the existing rows, which SQLite's only write lock already protects from changes."""
    cursor = _cursor(pooled)
    runs = {row[0]: RunRow(*row[1:]) for row in cursor.execute(_RUNS, (_json(wanted.runs),))}
    params: dict[Key, str] = {}
    if wanted.params:
        params = {(run_id, key): value for run_id, key, value in cursor.execute(_PARAMS, (_json(wanted.params),))}
    series: dict[Key, Series] = {}
    if wanted.series:
        rows = cursor.execute(_SERIES, (_json(wanted.series),))
        series = {(row[0], row[1]): Series(row[2], (row[3], row[4], row[5], bool(row[6]))) for row in rows}
    return KnownRows(runs, params, series)


def write(pooled: PoolProxiedConnection, known: KnownRows, changes: Changes, commit: bool) -> None:
    """Write the rows, and commit if `commit`."""
    cursor = _cursor(pooled)
    if changes.runs:
        cursor.execute(_REVISE_RUNS, (_json(sorted(changes.runs)),))
    ids = {name: series.id for name, series in known.series.items()}
    newest = [part for name, value in changes.newest.items() for part in (*name, *value)]
    for run_id, key, number in _insert(cursor, _NEWEST, 6, newest):
        ids[run_id, key] = number
    _insert(cursor, _POINTS, 5, _points(changes, ids))
    _insert(cursor, _NEW_PARAMS, 3, [part for name, value in changes.params.items() for part in (*name, value)])
    _insert(cursor, _TAGS, 3, [part for name, value in changes.tags.items() for part in (*name, value)])
    if changes.names:
        cursor.executemany(_NAME, [(name, run_id) for run_id, name in changes.names.items()])
    _insert(cursor, _TALLIES, 4, [part for tally, number in changes.tallies.items() for part in (*tally, number, 0)])
    if commit:
        cursor.execute("COMMIT")


def _points(changes: Changes, ids: dict[Key, int]) -> list[float]:
    rows: list[float] = []
    name: Key
    values: dict[Value, None]
    for name, values in chain(changes.fresh.items(), changes.other.items()):
        number = ids[name]
        for step, timestamp, value, is_nan in values:
            rows += (number, step, timestamp, value, is_nan)
    return rows


def _insert(cursor: sqlite3.Cursor, statement: tuple[str, str], columns: int, rows: Sequence[Any]) -> list[Any]:
    """Insert rows, given as one flat sequence of values. Returns the statement's result rows."""
    returned: list[Any] = []
    start = 0
    for count in ROWS:
        size = count * columns
        while len(rows) - start >= size:
            returned += cursor.execute(_text(statement, columns, count), rows[start : start + size]).fetchall()
            start += size
    return returned


@lru_cache
def _text(statement: tuple[str, str], columns: int, rows: int) -> str:
    marks = f"({', '.join('?' * columns)})"
    return statement[0] + ", ".join([marks] * rows) + statement[1]


def _json(names: Sequence[str] | Sequence[Key]) -> str:
    return msgspec.json.encode(names).decode()


def _cursor(pooled: PoolProxiedConnection) -> sqlite3.Cursor:
    driver: Any = pooled.driver_connection
    cursor: sqlite3.Cursor = driver.cursor()
    return cursor


# A run's next point in SQLite, the most frequent write: stored by the event loop itself, without a thread switch.
#
# The shortcut of `postgresql_points`, with its rule: what it does not store is handled by the group writer. It must not
# block the event loop, so it waits neither for another writer's lock nor for a checkpoint: a commit stays in the
# write-ahead log, which survives the kill of any process, until a later commit of another writer checkpoints it.

CHECKPOINT_INTERVAL = 160
"""One in this many points goes to the group writer, whose commit checkpoints 1,000 log pages: a point writes about six."""

_UPDATE_SERIES = """UPDATE latest_metrics SET step = ?1, timestamp = ?2, value = ?3, is_nan = ?4
    WHERE run_id = ?5 AND key = ?6 AND (step, timestamp, value) < (?1, ?2, ?3) AND EXISTS (
        SELECT 1 FROM runs WHERE id = ?5 AND lifecycle_stage = 'active' AND (?7 IS NULL OR organization = ?7)
    ) RETURNING id"""
_INSERT_POINT = "INSERT INTO metrics (series, step, timestamp, value, is_nan) VALUES (?, ?, ?, ?, ?)"
_INSERT_TALLY = """INSERT INTO call_tallies (id, call, number, taken_at) VALUES (?, ?, 1, 0)
    ON CONFLICT (id) DO UPDATE SET number = number + 1"""
_REVISE_RUN = "UPDATE runs SET revision = revision + 1 WHERE id = ?"


class SinglePointWriter:
    """One connection, used by one event loop; call `close` elsewhere only after its last write."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pooled: PoolProxiedConnection | None = None
        self._connecting = False
        self._closed = False
        self._attempts = 0

    async def store(self, write: RunWrite) -> bool:
        """Store a point. Returns whether it was committed; if not, nothing of it is stored."""
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
        [series] = cursor.execute(_UPDATE_SERIES, series_values).fetchone() or [None]
        if series is None:
            cursor.execute("ROLLBACK")
            return False
        cursor.execute(_INSERT_POINT, (series, step, timestamp, value, is_nan))
        cursor.execute(_REVISE_RUN, (write.run_id,))
        if write.tally:
            cursor.execute(_INSERT_TALLY, write.tally)
        cursor.execute("COMMIT")
    except BaseException:
        driver.rollback()
        raise
    return True
