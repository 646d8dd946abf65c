"""SQL queries: read-only, one database, streamed by row; values without a JSON form are refused."""

import sqlite3
import tracemalloc
from pathlib import Path

import psycopg
import pytest

from recipes.records.sql_query import BadQuery, encode_row, iterate_query_lines
from tests.api.waiting import wait_for
from tests.support.postgres_server import postgres, postgres_url
from tests.support.shop_database import shop, warehouse

__all__ = ["postgres", "postgres_url", "shop", "warehouse"]


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("DELETE FROM orders", "the database says"),
        ("WITH gone AS (DELETE FROM orders RETURNING id) SELECT * FROM gone", "the database says"),
        ("SELECT setval('ids', 7)", "read-only transaction"),
        ("SELECT id, id FROM orders", "two columns"),
        ("SELECT unknown FROM orders", "does not exist"),
        ("SELECT 'NaN'::float8 AS x", "column 'x' contains nan"),
        ("SELECT host FROM orders", "cast it to text"),
        ("SELECT id FROM orders WHERE id < 0", "the query has no rows"),
    ],
)
def test_writing_or_lossy_postgresql_query_is_refused(warehouse: str, statement: str, reason: str) -> None:
    with psycopg.connect(warehouse) as connection:
        connection.execute("CREATE SEQUENCE ids")
    with pytest.raises(BadQuery, match=reason) as refused:
        list(iterate_query_lines(warehouse, statement))
    assert "\n" not in str(refused.value)
    others = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with psycopg.connect(warehouse, autocommit=True) as connection:
        found = connection.execute("SELECT (SELECT count(*) FROM orders), (SELECT last_value FROM ids)").fetchone()
        # Regression: a refused row kept its connection and transaction open as long as the exception was referenced.
        wait_for(lambda: connection.execute(f"{others} AND backend_type = 'client backend'").fetchone() is None)
    assert found == (2500, 1)


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("DELETE FROM orders", "readonly"),
        ("PRAGMA hard_heap_limit=100000000", "not authorized"),
        ("SELECT zeroblob(900000000) AS x", "too big"),
        ("SELECT id, id FROM orders", "two columns"),
        ("SELECT unknown FROM orders", "no such column"),
        ("SELECT 9e999 AS x", "column 'x' contains inf"),
        ("SELECT * FROM orders WHERE id < 0", "the query has no rows"),
        ("", "the query has no rows"),
    ],
)
def test_writing_or_lossy_sqlite_query_is_refused(shop: str, statement: str, reason: str) -> None:
    with pytest.raises(BadQuery, match=reason):
        list(iterate_query_lines(shop, statement))
    assert sum(block.count(b"\n") for block in iterate_query_lines(shop, "SELECT id FROM orders")) == 2500


@pytest.mark.parametrize(
    ("database", "statement", "words"),
    [
        (None, "ATTACH 'made.db' AS made", "the database says"),
        (None, "VACUUM INTO 'made.db'", "the database says"),
        (None, "SELECT 1; SELECT 2", "one statement at a time"),
        (None, "SELECT '\udcff'", "text that is not valid UTF-8"),
        (None, "SELECT 1 AS x\0, 2 AS y", "text that is not valid UTF-8"),
        ("sqlite://[", "SELECT 1", "is not a database address"),
        ("postgresql://someone:the-password@[", "SELECT 1", "the database says"),
    ],
)
def test_invalid_query_is_refused_in_one_line_without_creating_a_database(
    shop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str | None, statement: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadQuery, match=words) as refused:
        list(iterate_query_lines(database or shop, statement))
    assert "the-password" not in str(refused.value)
    assert not (tmp_path / "made.db").exists()


@pytest.mark.parametrize("value", [float("nan"), [1.0, float("inf")], [[float("nan")]], {"a": [float("-inf")]}])
def test_non_json_number_in_an_array_is_refused(value: object) -> None:
    """PostgreSQL arrays may contain them. Regression: they became null."""
    with pytest.raises(BadQuery, match="column 'x' contains"):
        encode_row(["id", "x"], [1, value])
    assert encode_row(["id", "x"], [1, [1.5, (2.5, None)]]) == b'{"id":1,"x":[1.5,[2.5,null]]}\n'


def test_read_only_query_can_use_virtual_tables(tmp_path: Path) -> None:
    """Full-text search reads a setting of its table."""
    path = tmp_path / "notes.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE VIRTUAL TABLE notes USING fts5(text)")
        connection.execute('INSERT INTO notes VALUES (\'["lamp", "door"]\')')
    statement = "SELECT word.value AS word FROM notes, json_each(notes.text) AS word WHERE notes MATCH 'lamp'"
    assert b"".join(iterate_query_lines(f"sqlite:///{path}", statement)) == b'{"word":"lamp"}\n{"word":"door"}\n'


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"


@pytest.mark.parametrize("database", ["shop", "warehouse"])
@pytest.mark.parametrize("rows", ["i FROM n", "count(*) FROM n"])
def test_endless_query_is_stopped_at_its_time_limit(request: pytest.FixtureRequest, database: str, rows: str) -> None:
    """Both with and without producing rows."""
    with pytest.raises(BadQuery, match="exceeded the limit of 1 s: select fewer"):
        for _ in iterate_query_lines(request.getfixturevalue(database), f"{ENDLESS} {rows}", 1):
            pass


@pytest.mark.parametrize(
    ("database", "wide"),
    [("shop", "hex(zeroblob(500000))"), ("warehouse", "repeat('x', 1000000)")],
    ids=["sqlite", "postgresql"],
)
def test_query_holds_one_wide_row_in_memory(request: pytest.FixtureRequest, database: str, wide: str) -> None:
    """Also after narrow rows. Regression: a thousand rows were fetched at a time."""
    statement = f"SELECT CASE WHEN id < 2000 THEN 'x' ELSE {wide} END AS text FROM orders WHERE id < 2100"
    tracemalloc.start()
    try:
        size = sum(map(len, iterate_query_lines(request.getfixturevalue(database), statement)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 100_000_000
    assert peak < 12_000_000


def test_timestamps_are_written_in_utc_for_any_server_time_zone(warehouse: str, postgres_url: str) -> None:
    with psycopg.connect(warehouse, autocommit=True) as connection:
        connection.execute(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET timezone TO %L', current_database(), 'Asia/Tokyo'); END $$"
        )
        assert connection.execute("SELECT 1").fetchone()
    assert list(iterate_query_lines(warehouse, "SELECT at FROM orders LIMIT 1")) == [b'{"at":"2024-02-29T12:30:00Z"}\n']
