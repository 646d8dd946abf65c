"""The audit log: who called what, as events of the topic `audit`, which the relay publishes like any other (rows X4, Q7)."""

from collections.abc import Iterable

import msgspec
from msgspec import structs
from sqlalchemy import ColumnElement, Connection, func, select

from resources.metadata.outbox import Event, emit
from resources.metadata.tables import events

TOPIC = "audit"
TYPE = "audit.call"
MAX_KEY = 256
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


def record(connection: Connection, calls: Iterable[AuditedCall]) -> None:
    """Write calls in the caller's transaction."""
    for call in calls:
        key = key_of(call.organization, call.user)
        payload = structs.asdict(call) | {"roles": list(call.roles), "objects": list(call.objects[:MAX_OBJECTS])}
        emit(connection, TOPIC, TYPE, key, payload)


def key_of(organization: str, user: str) -> str:
    """The key of a user's calls. Long ones are cut, so it alone does not tell whose a call is."""
    return f"{organization}/{user}"[:MAX_KEY]


def calls_of(
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
    query = select(events).where(events.c.topic == TOPIC, events.c.payload["organization"].as_string() == organization)
    if since is None:
        query = query.where(events.c.seq > after)
    else:
        # One bound: of two SQLite takes the first. And of a sum no index is taken: calls come in the order of `seq`.
        query = query.where(events.c.seq >= first_since(since, after), events.c.created_at + 0 >= since)
    if user is not None:
        # Key and type are what an index finds: the rest of the log, of all users, is not read for it.
        query = query.where(
            events.c.key == key_of(organization, user), events.c.type == TYPE, events.c.payload["user"].as_string() == user
        )
    if type is not None:
        query = query.where(events.c.type == type)
    return [Event(**row) for row in connection.execute(query.order_by(events.c.seq).limit(limit)).mappings()]


def first_since(since: int, after: int) -> ColumnElement[int]:
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
