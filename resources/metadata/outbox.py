"""The events table: a change and its event are one transaction, so neither exists without the other (row Q9)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, text

from resources.metadata.tables import events

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


def lock_order(connection: Connection) -> None:
    """Hold the order of events until the end of the transaction.

    Sequence numbers of PostgreSQL are given out before the commit, so a slow transaction could commit a number that
    readers have passed already. The lock makes the order of numbers the order of commits; SQLite has one writer anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": POSTGRES_OUTBOX_LOCK})


def emit(connection: Connection, topic: str, type: str, key: str, payload: Mapping[str, Any]) -> int:
    """Write an event in the caller's transaction. Returns its `seq`."""
    lock_order(connection)
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


def time_of(connection: Connection, seq: int) -> int | None:
    """When an event was written, in milliseconds; None where there is none of that number."""
    return connection.execute(select(events.c.created_at).where(events.c.seq == seq)).scalar_one_or_none()


def newest(connection: Connection) -> tuple[int, int]:
    """`seq` and time of the newest event; twice 0 where there is none."""
    found = connection.execute(select(events.c.seq, events.c.created_at).order_by(events.c.seq.desc()).limit(1)).first()
    return (found.seq, found.created_at) if found else (0, 0)
