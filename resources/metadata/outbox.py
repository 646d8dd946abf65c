"""Transactional outbox: the events table and the positions of its readers."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, text

from resources.metadata.tables import event_positions as table
from resources.metadata.tables import events
from resources.metadata.transactions import insert_into

# The events table: a change and its event are committed together, so neither exists without the other.

POSTGRES_OUTBOX_LOCK = 57_000_001


@dataclass(frozen=True)
class Event:
    """One event. `seq` grows in commit order, so a reader's position skips nothing."""

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

    PostgreSQL assigns sequence numbers before the commit, so a slow transaction could commit a number that readers have
    already passed. The lock makes the order of numbers the order of commits; SQLite has only one writer anyway.
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
    """Return events after `seq` in commit order, of the given types (default: all)."""
    query = select(events).where(events.c.seq > seq).order_by(events.c.seq).limit(limit)
    if types:
        query = query.where(events.c.type.in_(types))
    return [Event(**row) for row in connection.execute(query).mappings()]


def event_time(connection: Connection, seq: int) -> int | None:
    """Return when an event was written (ms since 1970), None if it is missing."""
    return connection.execute(select(events.c.created_at).where(events.c.seq == seq)).scalar_one_or_none()


def newest_event(connection: Connection) -> tuple[int, int]:
    """Return `seq` and time of the newest event, or zeros if there is none."""
    found = connection.execute(select(events.c.seq, events.c.created_at).order_by(events.c.seq.desc()).limit(1)).first()
    return (found.seq, found.created_at) if found else (0, 0)


# Positions of readers that have no cursor of their own, as Dagster's sensors have.


def read_position(connection: Connection, reader: str) -> int:
    """Return the `seq` of the reader's last processed event, 0 for a new reader."""
    return connection.execute(select(table.c.seq).where(table.c.reader == reader)).scalar_one_or_none() or 0


def advance_position(connection: Connection, reader: str, seq: int) -> None:
    """Record in the caller's transaction that events up to `seq` are processed; never decreases."""
    row = insert_into(connection, table).values(reader=reader, seq=seq)
    connection.execute(
        row.on_conflict_do_update(index_elements=["reader"], set_={"seq": seq}, where=table.c.seq < row.excluded.seq)
    )
