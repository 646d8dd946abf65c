"""Rows that runs log, in SQLite: few statements over many rows each.

Python gives up its lock at every statement and waits for it again, up to 5 ms while the event loop is busy: a statement for
each row would make a group take as long as its rows are many.
"""

import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import msgspec
from sqlalchemy import PoolProxiedConnection

from resources.metadata.writes.run_writes import Changes, Key, KnownRows, RunRow, Series, Value, WantedRows

ROWS = (1000, 100, 10, 1)
"""Rows in one INSERT: few different statements, which SQLite prepares once, and none over its 32,766 variables."""

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
# By a quarter faster than ON CONFLICT, and than neither of them, for which SQLite notes how to take a statement back.
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
_REVISED = "UPDATE runs SET revision = revision + 1 WHERE id IN (SELECT value FROM json_each(?))"
_NAME = "UPDATE runs SET name = ? WHERE id = ?"


def begin(pooled: PoolProxiedConnection) -> None:
    _cursor(pooled).execute("BEGIN IMMEDIATE")


def read(pooled: PoolProxiedConnection, wanted: WantedRows) -> KnownRows:
    """The rows that exist. The transaction holds SQLite's one write lock already, so that they stay as they are."""
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
    """Write the rows, and end the transaction where `commit` says so."""
    cursor = _cursor(pooled)
    if changes.runs:
        cursor.execute(_REVISED, (_json(sorted(changes.runs)),))
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
    """Insert the rows, which follow each other value by value. Returns the rows that the statement returns."""
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
