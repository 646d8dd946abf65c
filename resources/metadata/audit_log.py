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

# Calls are events of the topic `audit`, which the relay publishes like any other.

AUDIT_TOPIC = "audit"
CALL_EVENT = "audit.call"
MAX_KEY_LENGTH = 256
MAX_OBJECTS = 100


class AuditedCall(msgspec.Struct, frozen=True, gc=False):
    """A call and its outcome, or `count` equal calls.

    If several calls are combined, `duration_ms` is 0. `user` and `organization` are empty if the token did not prove any. A
    struct, because one is created for each logged metric.
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
    """Return the event key of a user's calls.

    Long keys are cut, so a key alone does not identify a user.
    """
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
    """Return an organization's calls in the order of recording; `since` is in milliseconds."""
    query = select(events).where(events.c.topic == AUDIT_TOPIC, events.c.payload["organization"].as_string() == organization)
    if since is None:
        query = query.where(events.c.seq > after)
    else:
        # A single bound on `seq`: SQLite uses the first of two. `created_at + 0` cannot use an index, so the order by `seq`
        # is used.
        query = query.where(events.c.seq >= first_event_since(since, after), events.c.created_at + 0 >= since)
    if user is not None:
        # An index on key and type finds a user's calls without reading the whole log.
        query = query.where(
            events.c.key == user_key(organization, user),
            events.c.type == CALL_EVENT,
            events.c.payload["user"].as_string() == user,
        )
    if type is not None:
        query = query.where(events.c.type == type)
    return [Event(**row) for row in connection.execute(query.order_by(events.c.seq).limit(limit)).mappings()]


def first_event_since(since: int, after: int) -> ColumnElement[int]:
    """Return the `seq` of the first event after `after` and not before `since`, or NULL.

    Usually that is the very next event, or only few events are that recent. Clocks can be set back, so a later event may
    have an earlier time: take the smallest `seq` of a range of the time index, not the one with the earliest time.
    """
    following = select(events.c.seq, events.c.created_at).where(events.c.seq > after)
    next_one = following.order_by(events.c.seq).limit(1).subquery()
    at_once = select(next_one.c.seq).where(next_one.c.created_at >= since).scalar_subquery()
    # `seq + 0` cannot use the index on `seq`: otherwise both databases would scan all events in its order.
    number = events.c.seq + 0
    among = select(func.min(number)).where(events.c.created_at >= since, number > after).scalar_subquery()
    return func.coalesce(at_once, among)


# Calls that come thousands of times are counted, one row per kind, and the counts are flushed into the audit log
# periodically. A count is committed with the change that it counts, so a kill never loses one of the two; any server may
# flush the counts.
#
# Lock order: counting here locks the outbox first, counting in `writes` locks its runs first, and both then lock counts in
# the order of their ids. So there are no deadlocks.

FLUSH_PERIOD_MS = 60_000
"""Minimum interval between two audit rows of the same kind, except for the first."""
MAX_FLUSHED = 1000
CACHE_SIZE = 10_000


class Tally(NamedTuple):
    """A kind of call: the id of its count, and the call as JSON."""

    id: str
    call: str


@lru_cache(CACHE_SIZE)
def make_tally(call: AuditedCall) -> Tally:
    """Return the tally of a call without duration and count."""
    text = json.dumps(structs.asdict(call))  # ASCII, because names sent by clients may hold any character
    return Tally(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), text)


def count_calls(connection: Connection, calls: Iterable[AuditedCall]) -> None:
    """Count calls in the caller's transaction, each `count` times."""
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
    """Return counted calls to be logged in the caller's transaction, and reset their counts.

    Only kinds that were not flushed within `period` (milliseconds, as `now`) are returned. Kinds without calls since their
    last flush are deleted.
    """
    lock_event_order(connection)
    # Counts that another transaction is changing are left for the next flush.
    due = select(table).where(table.c.taken_at <= now - period).order_by(table.c.id).limit(MAX_FLUSHED)
    rows = connection.execute(due.with_for_update(skip_locked=True)).all()
    counted = [row for row in rows if row.number]
    connection.execute(delete(table).where(table.c.id.in_([row.id for row in rows if not row.number])))
    connection.execute(update(table).where(table.c.id.in_([row.id for row in counted])).values(number=0, taken_at=now))
    return [structs.replace(msgspec.convert(json.loads(row.call), AuditedCall), count=row.number) for row in counted]
