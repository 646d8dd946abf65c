"""A group of writes in one transaction: what they need is read, what becomes of them is decided, and it is written."""

from collections.abc import Sequence
from typing import Protocol

from sqlalchemy import Dialect, PoolProxiedConnection

from resources.errors import HanzoError
from resources.metadata.transactions import driver_errors
from resources.metadata.writes import run_rows_sqlite
from resources.metadata.writes.run_writes import Changes, Known, RunWrite, Wanted, decide, wanted


class RunRows(Protocol):
    """A module that knows how one kind of database reads and writes the rows of runs."""

    def begin(self, pooled: PoolProxiedConnection) -> None: ...

    def read(self, pooled: PoolProxiedConnection, wanted: Wanted) -> Known: ...

    def write(self, pooled: PoolProxiedConnection, known: Known, changes: Changes, commit: bool) -> None: ...


def write_group(
    pooled: PoolProxiedConnection, dialect: Dialect, writes: Sequence[RunWrite], *, whole_transaction: bool = False
) -> list[HanzoError | None]:
    """Store what the writes want, in the connection's transaction or in one of their own.

    Returns for each write in its place why it was refused, or None. What one is refused for changes nothing for the others.
    """
    rows = _rows_of(dialect)
    with driver_errors(dialect):
        if whole_transaction:
            rows.begin(pooled)
        known = rows.read(pooled, wanted(writes))
        decision = decide(writes, known)
        rows.write(pooled, known, decision.changes, commit=whole_transaction)
    return decision.refusals


def _rows_of(dialect: Dialect) -> RunRows:
    """The statements in the dialect's words. Its driver is loaded only where it is used."""
    if dialect.name != "postgresql":
        return run_rows_sqlite
    from resources.metadata.writes import run_rows_postgresql

    return run_rows_postgresql
