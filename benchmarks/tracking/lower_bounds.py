"""Lower bounds: FastAPI without any work, and rows written by a loop without a server."""

import sqlite3
import time
from pathlib import Path

import psycopg
from fastapi import FastAPI, Request

from benchmarks.tracking.cases import BATCH

BATCHES = 200
COMMITS = 1000
TABLE = (
    "CREATE TABLE floor (series bigint, step bigint, timestamp bigint, value double precision, PRIMARY KEY (series, step))"
)

bare = FastAPI()
"""Reads a JSON body and answers `{}`: `uvicorn benchmarks.tracking.lower_bounds:bare`."""


@bare.post("/api/2.0/mlflow/runs/create")
async def create() -> dict[str, object]:
    return {"run": {"info": {"run_id": "bare"}}}


@bare.post("/{path:path}")
async def nothing(request: Request) -> dict[str, str]:
    await request.json()
    return {}


@bare.get("/health")
async def health() -> str:
    return "OK"


def batches() -> list[list[tuple[int, int, int, float]]]:
    return [[(n % 10, first * 100 + n // 10, first, n / 7) for n in range(BATCH)] for first in range(BATCHES)]


def sqlite_rows(folder: Path) -> float:
    """Return rows per second into SQLite, one transaction per batch, with our durability."""
    connection = sqlite3.connect(folder / "floor.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(TABLE)
    made = batches()
    began = time.perf_counter()
    for rows in made:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO floor VALUES (?, ?, ?, ?)", rows)
        connection.execute("COMMIT")
    taken = time.perf_counter() - began
    connection.close()
    return BATCHES * BATCH / taken


def committed_rows(url: str) -> float:
    """Return single-row commits per second into PostgreSQL: the cost of waiting for a commit."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE single (value double precision)")
        began = time.perf_counter()
        for n in range(COMMITS):
            connection.execute("INSERT INTO single VALUES (%s)", (n / 7,), prepare=True)
        return COMMITS / (time.perf_counter() - began)


def copied_rows(url: str) -> float:
    """Return rows per second into PostgreSQL by COPY, one transaction per batch."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLE)
        made = ["".join(f"{a}\t{b}\t{c}\t{d}\n" for a, b, c, d in rows) for rows in batches()]
        began = time.perf_counter()
        for text in made:
            with connection.cursor().copy("COPY floor FROM STDIN") as copy:
                copy.write(text)
        return BATCHES * BATCH / (time.perf_counter() - began)
