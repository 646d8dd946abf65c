"""Audit log: calls are counted with the data they store and flushed exactly once."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import pytest

from resources.errors import HanzoError
from resources.metadata.audit_log import (
    FLUSH_PERIOD_MS,
    AuditedCall,
    count_calls,
    flush_counts,
    is_flush_due,
    list_calls,
    make_tally,
    record_calls,
)
from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.outbox import now_ms
from resources.metadata.ownership import ObjectKind, Reference
from resources.metadata.tracking.tracking import Tracking
from resources.metadata.writes.group_commit import RunWriter
from resources.metadata.writes.write_decisions import RunWrite, run_write

NOW = 1_000_000_000


def call(user: str, route: str = "/log") -> AuditedCall:
    return AuditedCall(user, "o", (), "POST", route, ("run:run",), 200, "c", 0.0)


def point(step: int, user: str, run: str = "run", key: str = "loss") -> RunWrite:
    return run_write(run, [metric_point(key, 0.5, step, 1)]).with_tally(make_tally(call(user)))


@pytest.fixture
def tracking(database: Database) -> Tracking:
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    for run_id in ("run", "deleted"):
        tracking.runs.create(0, run_id=run_id)
    tracking.runs.delete("deleted")
    return tracking


def writing(database: Database, test: Callable[[RunWriter], Awaitable[None]]) -> None:
    async def run() -> None:
        writer = RunWriter(database)
        try:
            await asyncio.wait_for(test(writer), 60)
        finally:
            await asyncio.to_thread(writer.close)

    asyncio.run(run())


def taken(database: Database, now: int, period: int = FLUSH_PERIOD_MS) -> dict[str, int]:
    with database.write() as connection:
        return {each.user: each.count for each in flush_counts(connection, now, period)}


def test_logging_call_is_counted_unless_it_is_refused(database: Database, tracking: Tracking) -> None:
    async def test(writer: RunWriter) -> None:
        await writer.store(point(0, "ann"))
        for step in (1, 2):
            await writer.store(point(step, "ann"))  # sent alone, so it takes the fast path
        assert (await asyncio.gather(*(point_of(writer, step) for step in range(3, 9)))).count(None) == 6
        refused = [point(9, "ann", "deleted"), point(9, "ann", "unknown")]
        assert all([isinstance(await answer(writer, write), HanzoError) for write in refused])

    async def point_of(writer: RunWriter, step: int) -> BaseException | None:
        return await answer(writer, point(step, "ann" if step % 2 else "bob"))

    async def answer(writer: RunWriter, write: RunWrite) -> BaseException | None:
        return (await asyncio.gather(writer.store(write), return_exceptions=True))[0]

    writing(database, test)
    assert taken(database, NOW) == {"ann": 6, "bob": 3}


def test_write_refused_by_the_database_is_not_counted(database: Database, tracking: Tracking) -> None:
    refuse = {
        "sqlite": "CREATE TRIGGER refuse BEFORE INSERT ON params WHEN NEW.key = 'bad' BEGIN SELECT RAISE(ABORT, 'no'); END",
        "postgresql": "ALTER TABLE params ADD CHECK (key <> 'bad')",
    }
    with database.write() as connection:
        connection.exec_driver_sql(refuse[connection.dialect.name])

    async def test(writer: RunWriter) -> None:
        writes = [run_write("run", params=[(key, "1")]).with_tally(make_tally(call("ann"))) for key in ("a", "bad", "b")]
        got = await asyncio.gather(*(writer.store(write) for write in writes), return_exceptions=True)
        assert [each is None for each in got] == [True, False, True]

    writing(database, test)
    assert taken(database, NOW) == {"ann": 2}


def test_repeated_call_is_logged_at_once_and_then_once_per_period(database: Database) -> None:
    def counted(*users: str) -> None:
        with database.write() as connection:
            count_calls(connection, map(call, users))

    counted("ann", "bob", "ann")
    assert is_flush_due(database, NOW) and taken(database, NOW) == {"ann": 2, "bob": 1}
    counted("ann")
    assert not is_flush_due(database, NOW + FLUSH_PERIOD_MS - 1) and taken(database, NOW + FLUSH_PERIOD_MS - 1) == {}
    assert is_flush_due(database, NOW + FLUSH_PERIOD_MS) and taken(database, NOW + FLUSH_PERIOD_MS) == {"ann": 1}
    counted("bob")
    assert taken(database, NOW + FLUSH_PERIOD_MS) == {"bob": 1}, "nothing came of him for a period: it is his first again"
    assert taken(database, NOW + 2 * FLUSH_PERIOD_MS) == {}
    assert not is_flush_due(database, NOW + 9 * FLUSH_PERIOD_MS), "all is forgotten"


def test_call_naming_invalid_text_is_counted(database: Database) -> None:
    """A forged call must not stop the counting of others."""
    odd = replace_objects(call("ann"), ["run:\ud800", "run:\x00"])
    with database.write() as connection:
        count_calls(connection, [odd, odd])
    with database.write() as connection:
        [found] = flush_counts(connection, NOW)
    assert (found.objects, found.count) == (odd.objects, 2)


def test_invalid_characters_in_an_object_name_leave_the_log_readable(database: Database) -> None:
    """Regression: PostgreSQL reads no field of a row with U+0000.

    One such call made the log unreadable for everyone.
    """
    named = str(Reference(ObjectKind.RUN, "a\x00b\ud800"))
    with database.write() as connection:
        record_calls(connection, [replace_objects(call("ann"), [named]), call("bob")])
    with database.read() as connection:
        found = list_calls(connection, call("ann").organization)
    assert [event.payload["user"] for event in found] == ["ann", "bob"]
    assert found[0].payload["objects"] == ["run:a\ufffdb\ufffd"]


def replace_objects(of: AuditedCall, objects: Sequence[str]) -> AuditedCall:
    return AuditedCall(of.user, of.organization, of.roles, of.method, of.route, tuple(objects), 404, of.client, 0.0)


def test_concurrent_servers_neither_lose_nor_duplicate_audited_calls(database: Database, tracking: Tracking) -> None:
    """They must not deadlock either, which PostgreSQL ends after a second by an error."""
    stopped = threading.Event()
    failed: list[Exception] = []
    counted: Counter[str] = Counter()

    def take_and_count(user: str) -> None:
        try:
            while not stopped.is_set():
                with database.write() as connection:
                    record_calls(connection, flush_counts(connection, now_ms(), 0))
                with database.write() as connection:
                    count_calls(connection, [call("ann"), call(user), call("bob")])
                counted.update(["ann", user, "bob"])
        except Exception as error:
            failed.append(error)

    async def test(writer: RunWriter) -> None:
        other = RunWriter(database)

        async def client(by: RunWriter, user: str, key: str) -> None:
            for step in range(100):
                await by.store(point(step, user, key=key))

        users = [
            (by, user, f"{user}{number}") for number, by in enumerate((writer, other)) for user in ("ann", "bob", "cid")
        ]
        await asyncio.gather(*(client(*each) for each in users))
        await asyncio.to_thread(other.close)

    threads = [threading.Thread(target=take_and_count, args=(user,)) for user in ("dan", "eve")]
    for thread in threads:
        thread.start()
    try:
        writing(database, test)
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert failed == []
    with database.write() as connection:
        record_calls(connection, flush_counts(connection, now_ms(), 0))
        found: Counter[str] = Counter()
        for event in list_calls(connection, "o", limit=10**6):
            found[event.payload["user"]] += event.payload["count"]
    assert found == counted + Counter(ann=200, bob=200, cid=200)
