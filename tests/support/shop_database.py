"""Databases of orders, the source of query datasets."""

import sqlite3
from pathlib import Path

import psycopg
import pytest


@pytest.fixture
def shop(tmp_path: Path) -> str:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER, note TEXT, raw BLOB, price REAL)")
        rows = [(number, f"note {number}", b"\x00\xff", None if number % 2 else 0.5) for number in range(2500)]
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", rows)
    return f"sqlite:///{path}"


@pytest.fixture
def warehouse(postgres_url: str) -> str:
    """Create the orders in PostgreSQL, with value types that SQLite lacks."""
    with psycopg.connect(postgres_url) as connection:
        connection.execute(
            "CREATE TABLE orders (id int, price numeric(10, 2), day date, at timestamptz, took interval, raw bytea,"
            " note jsonb, key uuid, parts int[], host inet)"
        )
        connection.execute(
            "INSERT INTO orders SELECT n, n + 0.10, '2024-02-29', '2024-02-29 12:30+00', '90 seconds', '\\x00ff',"
            """ '{"a": [1.5, null]}', '00000000-0000-0000-0000-000000000001', '{1,2}', '10.0.0.1'"""
            " FROM generate_series(0, 2499) AS n"
        )
    return postgres_url
