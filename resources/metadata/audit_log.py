"""Audit log: who called what, with frequent calls counted instead of listed."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import msgspec
from msgspec import structs
from sqlalchemy import ColumnElement, Connection, delete, func, select, update

from resources.metadata.database import Database
from resources.metadata.outbox import Event, emit, lock_event_order
from resources.metadata.tables import call_tallies as table
from resources.metadata.tables import events
from resources.metadata.transactions import insert_into

# The audit log: who called what, as events of the topic `audit`, which the relay publishes like any other (rows X4, Q7).

AUDIT_TOPIC = "audit"
CALL_EVENT = "audit.call"
MAX_KEY_LENGTH = 256
MAX_OBJECTS = 100


class AuditedCall(msgspec.Struct, frozen=True, gc=False):
    """A call and how it was answered. `count` calls where equal ones were put together; then `duration_ms` is 0.

    `user` and `organization` are empty where the token did not prove any. A struct, because each logged metric makes one.
    """

    user: str
    organization: str
    roles: tuple[str, ...]
    method: str
    route: str
    objects: tuple[str, ...]
    status: int
    client: str
    duration_ms: float
    count: int = 1


def record_calls(connection: Connection, calls: Iterable[AuditedCall]) -> None:
    """Write calls in the caller's transaction."""
    for call in calls:
        key = user_key(call.organization, call.user)
        payload = structs.asdict(call) | {"roles": list(call.roles), "objects": list(call.objects[:MAX_OBJECTS])}
        emit(connection, AUDIT_TOPIC, CALL_EVENT, key, payload)


def user_key(organization: str, user: str) -> str:
    """The key of a user's calls. Long ones are cut, so it alone does not tell whose a call is."""
    return f"{organization}/{user}"[:MAX_KEY_LENGTH]


def list_calls(
    connection: Connection,
    organization: str,
    *,
    after: int = 0,
    since: int | None = None,
    user: str | None = None,
    type: str | None = None,
    limit: int = 100,
) -> list[Event]:
    """The calls of an organization in the order in which they were recorded; `since` in milliseconds."""
    query = select(events).where(events.c.topic == AUDIT_TOPIC, events.c.payload["organization"].as_string() == organization)
    if since is None:
        query = query.where(events.c.seq > after)
    else:
        # One bound: of two SQLite takes the first. And of a sum no index is taken: calls come in the order of `seq`.
        query = query.where(events.c.seq >= first_event_since(since, after), events.c.created_at + 0 >= since)
    if user is not None:
        # Key and type are what an index finds: the rest of the log, of all users, is not read for it.
        query = query.where(
            events.c.key == user_key(organization, user),
            events.c.type == CALL_EVENT,
            events.c.payload["user"].as_string() == user,
        )
    if type is not None:
        query = query.where(events.c.type == type)
    return [Event(**row) for row in connection.execute(query.order_by(events.c.seq).limit(limit)).mappings()]


def first_event_since(since: int, after: int) -> ColumnElement[int]:
    """The `seq` of the first event since a time, of those after `after` and of any topic; NULL where there is none.

    Mostly it is the very next one, or all that are since that time are few. Clocks are set back, so that a later event may
    have an earlier time: the first is not the one with the earliest time, but the least of a range of the index by time.
    """
    following = select(events.c.seq, events.c.created_at).where(events.c.seq > after)
    next_one = following.order_by(events.c.seq).limit(1).subquery()
    at_once = select(next_one.c.seq).where(next_one.c.created_at >= since).scalar_subquery()
    # Of a sum no index knows the least, nor what is beyond a bound: else both databases go through all by their `seq`.
    number = events.c.seq + 0
    among = select(func.min(number)).where(events.c.created_at >= since, number > after).scalar_subquery()
    return func.coalesce(at_once, among)


# Calls that come thousands of times are counted, each kind in one row, and the counts are put into the audit log from
# time to time (row X4). A count is part of the transaction that makes the change, so neither is there without the other,
# whatever is killed; whichever server comes by puts it into the log.
#
# What counts here holds the outbox first, what `writes` counts holds its runs; both lock counts in the order of their
# ids. So none waits for another that waits for it.

FLUSH_PERIOD_MS = 60_000
"""At most one row of each kind in so long a time, but for the first."""
MAX_FLUSHED = 1000
CACHE_SIZE = 10_000


class Tally(NamedTuple):
    """A kind of calls: where it is counted, and the call as JSON."""

    id: str
    call: str


@lru_cache(CACHE_SIZE)
def make_tally(call: AuditedCall) -> Tally:
    """Of a call without its own duration and count."""
    text = json.dumps(structs.asdict(call))  # in ASCII, whatever somebody sent as a name
    return Tally(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), text)


def count_calls(connection: Connection, calls: Iterable[AuditedCall]) -> None:
    """Count calls in the caller's transaction, each as often as it says itself."""
    counts: Counter[Tally] = Counter()
    for call in calls:
        counts[make_tally(structs.replace(call, duration_ms=0.0, count=1))] += call.count
    if not counts:
        return
    lock_event_order(connection)
    for tally, number in sorted(counts.items()):
        row = insert_into(connection, table).values(id=tally.id, call=tally.call, number=number, taken_at=0)
        more = {"number": table.c.number + row.excluded.number}
        connection.execute(row.on_conflict_do_update(index_elements=["id"], set_=more))


def is_flush_due(database: Database, now: int, period: int = FLUSH_PERIOD_MS) -> bool:
    with database.read() as connection:
        return connection.execute(select(table.c.id).where(table.c.taken_at <= now - period).limit(1)).first() is not None


def flush_counts(connection: Connection, now: int, period: int = FLUSH_PERIOD_MS) -> list[AuditedCall]:
    """Calls with their counts, to be put into the log in the caller's transaction: those of which none was put there within
    `period`, both in milliseconds. What came no more since is forgotten."""
    lock_event_order(connection)
    # What somebody counts just now is taken the next time.
    due = select(table).where(table.c.taken_at <= now - period).order_by(table.c.id).limit(MAX_FLUSHED)
    rows = connection.execute(due.with_for_update(skip_locked=True)).all()
    counted = [row for row in rows if row.number]
    connection.execute(delete(table).where(table.c.id.in_([row.id for row in rows if not row.number])))
    connection.execute(update(table).where(table.c.id.in_([row.id for row in counted])).values(number=0, taken_at=now))
    return [structs.replace(msgspec.convert(json.loads(row.call), AuditedCall), count=row.number) for row in counted]
