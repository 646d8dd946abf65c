"""Calls that come thousands of times are counted, each kind in one row, and the counts are put into the audit log from time
to time (row X4). A count is part of the transaction that makes the change, so neither is there without the other, whatever
is killed; whichever server comes by puts it into the log.

What counts here holds the outbox first, what `writes` counts holds its runs; both lock counts in the order of their ids. So
none waits for another that waits for it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import msgspec
from msgspec import structs
from sqlalchemy import Connection, delete, select, update

from resources.metadata.audit import AuditedCall
from resources.metadata.database import Database
from resources.metadata.outbox import lock_order
from resources.metadata.tables import call_tallies as table
from resources.metadata.transactions import insert_into

PERIOD_MS = 60_000
"""At most one row of each kind in so long a time, but for the first."""
MAX_TAKEN = 1000
KNOWN = 10_000


class Tally(NamedTuple):
    """A kind of calls: where it is counted, and the call as JSON."""

    id: str
    call: str


@lru_cache(KNOWN)
def tally_of(call: AuditedCall) -> Tally:
    """Of a call without its own duration and count."""
    text = json.dumps(structs.asdict(call))  # in ASCII, whatever somebody sent as a name
    return Tally(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), text)


def count(connection: Connection, calls: Iterable[AuditedCall]) -> None:
    """Count calls in the caller's transaction, each as often as it says itself."""
    counts: Counter[Tally] = Counter()
    for call in calls:
        counts[tally_of(structs.replace(call, duration_ms=0.0, count=1))] += call.count
    if not counts:
        return
    lock_order(connection)
    for tally, number in sorted(counts.items()):
        row = insert_into(connection, table).values(id=tally.id, call=tally.call, number=number, taken_at=0)
        more = {"number": table.c.number + row.excluded.number}
        connection.execute(row.on_conflict_do_update(index_elements=["id"], set_=more))


def is_due(database: Database, now: int, period: int = PERIOD_MS) -> bool:
    with database.read() as connection:
        return connection.execute(select(table.c.id).where(table.c.taken_at <= now - period).limit(1)).first() is not None


def take(connection: Connection, now: int, period: int = PERIOD_MS) -> list[AuditedCall]:
    """Calls with their counts, to be put into the log in the caller's transaction: those of which none was put there within
    `period`, both in milliseconds. What came no more since is forgotten."""
    lock_order(connection)
    # What somebody counts just now is taken the next time.
    due = select(table).where(table.c.taken_at <= now - period).order_by(table.c.id).limit(MAX_TAKEN)
    rows = connection.execute(due.with_for_update(skip_locked=True)).all()
    counted = [row for row in rows if row.number]
    connection.execute(delete(table).where(table.c.id.in_([row.id for row in rows if not row.number])))
    connection.execute(update(table).where(table.c.id.in_([row.id for row in counted])).values(number=0, taken_at=now))
    return [structs.replace(msgspec.convert(json.loads(row.call), AuditedCall), count=row.number) for row in counted]
