"""Transactional outbox: the events table and the positions of its readers."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, text

from resources.metadata.tables import event_positions as table
from resources.metadata.tables import events
from resources.metadata.transactions import insert_into

# The events table: a change and its event are one transaction, so neither exists without the other (row Q9).

POSTGRES_OUTBOX_LOCK = 57_000_001


@dataclass(frozen=True)
class Event:
    """One line of the log. `seq` grows in the order of commits, so a reader that keeps the last one misses nothing."""

    seq: int
    topic: str
    key: str
    type: str
    payload: Mapping[str, Any]
    created_at: int


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def lock_event_order(connection: Connection) -> None:
    """Hold the order of events until the end of the transaction.

    Sequence numbers of PostgreSQL are given out before the commit, so a slow transaction could commit a number that
    readers have passed already. The lock makes the order of numbers the order of commits; SQLite has one writer anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": POSTGRES_OUTBOX_LOCK})


def emit(connection: Connection, topic: str, type: str, key: str, payload: Mapping[str, Any]) -> int:
    """Write an event in the caller's transaction. Returns its `seq`."""
    lock_event_order(connection)
    timestamp = now_ms()
    row = insert(events).values(
        topic=topic, key=key, type=type, payload={**payload, "timestamp": timestamp}, created_at=timestamp
    )
    return int(connection.execute(row.returning(events.c.seq)).scalar_one())


def read_after(connection: Connection, seq: int, types: Sequence[str] = (), limit: int = 100) -> list[Event]:
    """Events after `seq` in the order of their commits, of the given types (all when none is given)."""
    query = select(events).where(events.c.seq > seq).order_by(events.c.seq).limit(limit)
    if types:
        query = query.where(events.c.type.in_(types))
    return [Event(**row) for row in connection.execute(query).mappings()]


def event_time(connection: Connection, seq: int) -> int | None:
    """When an event was written, in milliseconds; None where there is none of that number."""
    return connection.execute(select(events.c.created_at).where(events.c.seq == seq)).scalar_one_or_none()


def newest_event(connection: Connection) -> tuple[int, int]:
    """`seq` and time of the newest event; twice 0 where there is none."""
    found = connection.execute(select(events.c.seq, events.c.created_at).order_by(events.c.seq.desc()).limit(1)).first()
    return (found.seq, found.created_at) if found else (0, 0)


# How far a reader of the events is, where no other keeps that for it: a Dagster sensor has a cursor of its own.


def read_position(connection: Connection, reader: str) -> int:
    """The `seq` of the last event that the reader is done with; 0 for a new one."""
    return connection.execute(select(table.c.seq).where(table.c.reader == reader)).scalar_one_or_none() or 0


def advance_position(connection: Connection, reader: str, seq: int) -> None:
    """Note, in the caller's transaction, that the reader is done with all events up to this one. It never goes back."""
    row = insert_into(connection, table).values(reader=reader, seq=seq)
    connection.execute(
        row.on_conflict_do_update(index_elements=["reader"], set_={"seq": seq}, where=table.c.seq < row.excluded.seq)
    )
