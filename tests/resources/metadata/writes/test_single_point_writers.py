"""Fast path for single metric points: equivalent to the group writer."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from resources.errors import HanzoError
from resources.metadata.audit_log import AuditedCall, make_tally
from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.tracking.tracking import Tracking
from resources.metadata.writes.group_commit import RunWriter, SinglePointStore, open_single_point_writer
from resources.metadata.writes.sqlite import CHECKPOINT_INTERVAL
from resources.metadata.writes.write_decisions import RunWrite, run_write
from tests.support.postgres_server import PostgresServer

on_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def tracking(database: Database) -> Tracking:
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    for run_id in ("short", "group", "deleted"):
        tracking.runs.create(0, run_id=run_id)
    tracking.run_data.log_metric("deleted", metric_point("loss", 1.0, 0, 0))
    tracking.runs.delete("deleted")
    return tracking


def point(run: str, step: int, value: float = 0.5, key: str = "loss", timestamp: int = 1, **of: str) -> RunWrite:
    return run_write(run, [metric_point(key, value, step, timestamp)], **of)


def with_points(database: Database, test: Callable[[SinglePointStore], Awaitable[None]]) -> None:
    async def run() -> None:
        points = open_single_point_writer(database)
        try:
            await asyncio.wait_for(test(points), 30)
        finally:
            points.close()

    uvloop.run(run())  # the server's event loop


def state(tracking: Tracking, run: str) -> object:
    histories = {key: tracking.metrics.history(run, key, 1000).points for key in ("loss", "accuracy")}
    return histories, tracking.run_search.get(tracking.runs.get(run)).metrics


def test_fast_path_accepts_only_the_next_point_of_a_known_series(database: Database, tracking: Tracking) -> None:
    tracking.run_data.log_batch("short", [metric_point("loss", 1.0, 5, 0)])
    tracking.run_data.log_batch("group", [metric_point("loss", 1.0, 5, 0)])

    async def test(points: SinglePointStore) -> None:
        before = tracking.runs.get("short").revision
        assert await points.store(point("short", 6))
        assert tracking.runs.get("short").revision > before
        assert [each.step for each in tracking.metrics.history("short", "loss", 10).points] == [5, 6]
        others = [
            point("short", 6),
            point("short", 4),
            point("short", 7, key="new"),
            point("unknown", 7),
            point("deleted", 7),
            point("short", 7, organization="another"),
        ]
        assert [await points.store(write) for write in others] == [False] * len(others)
        assert await points.store(point("short", 7, organization="default"))

    with_points(database, test)
    assert [each.step for each in tracking.metrics.history("short", "loss", 10).points] == [5, 6, 7]


def test_random_writes_end_as_with_the_group_writer(database: Database, tracking: Tracking) -> None:
    draw = random.Random(7)
    took = 0

    async def test(points: SinglePointStore) -> None:
        nonlocal took
        writer = RunWriter(database)
        writer._next_points.close()
        writer._next_points = points
        for number in range(300):
            value = draw.choice([0.0, -0.0, 0.5, 0.25, float("nan"), float("inf"), -1e300])
            step, timestamp = number // 3 + draw.randint(-2, 2), draw.randint(0, 2)
            key, organization = draw.choice(["loss", "accuracy"]), draw.choice([None, "default", "default", "another"])
            answers = []
            for run in ("short", "group"):
                write = run_write(run, [metric_point(key, value, step, timestamp)], organization=organization)
                try:
                    if run == "short":
                        stored = await points.store(write)
                        took += stored
                        if not stored:
                            await writer.store(write)
                    else:
                        await writer._enqueue(write)
                    answers.append(None)
                except HanzoError as refusal:
                    answers.append(str(refusal).replace(run, "RUN"))
            assert answers[0] == answers[1]
            assert state(tracking, "short") == state(tracking, "group")
        await asyncio.to_thread(writer.close)

    with_points(database, test)
    assert 50 < took < 250


END_ALL = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()"""


@on_postgresql
def test_connection_lost_during_a_statement_loses_no_point(database: Database, tracking: Tracking) -> None:
    tracking.run_data.log_metric("short", metric_point("loss", 1.0, 0, 0))

    async def test(points: SinglePointStore) -> None:
        assert await points.store(point("short", 1))
        with database.write() as holds_the_run:
            holds_the_run.exec_driver_sql("SELECT 1 FROM runs WHERE id = 'short' FOR UPDATE")
            call = asyncio.ensure_future(points.store(point("short", 2)))
            await asyncio.sleep(0.1)
            holds_the_run.exec_driver_sql(END_ALL)
            assert not await call
        assert await points.store(point("short", 2))

    with_points(database, test)
    assert len(tracking.metrics.history("short", "loss", 10).points) == 3


@on_postgresql
def test_backend_crash_before_it_reads_a_statement_loses_no_point(
    database: Database, tracking: Tracking, postgres: PostgresServer
) -> None:
    """The call used to wait forever.

    The backend sends a warning and closes the connection: uvloop reports both by one event.
    """
    tracking.run_data.log_metric("short", metric_point("loss", 1.0, 0, 0))

    async def test(points: SinglePointStore) -> None:
        assert await points.store(point("short", 1))
        backend = points._connection._pgconn.backend_pid  # type: ignore[attr-defined]
        os.kill(backend, signal.SIGSTOP)
        call = asyncio.ensure_future(points.store(point("short", 2)))
        await asyncio.sleep(0.1)
        os.kill(backend, signal.SIGQUIT)
        os.kill(backend, signal.SIGCONT)
        time.sleep(0.5)  # blocks the loop, which then finds the message and the end together
        assert not await call
        await asyncio.to_thread(postgres.wait_until_ready)  # it restarts all backends
        assert await points.store(point("short", 2))

    with_points(database, test)
    assert len(tracking.metrics.history("short", "loss", 10).points) == 3


@on_postgresql
def test_connection_lost_while_idle_is_replaced_before_the_next_point(database: Database, tracking: Tracking) -> None:
    """It is also no longer watched: the event loop would report its end repeatedly."""
    tracking.run_data.log_metric("short", metric_point("loss", 1.0, 0, 0))

    async def test(points: SinglePointStore) -> None:
        assert await points.store(point("short", 1))
        connection = points._connection  # type: ignore[attr-defined]
        with database.write() as other:
            other.exec_driver_sql(END_ALL)
        while not connection.is_lost:
            await asyncio.sleep(0.01)
        assert not asyncio.get_running_loop().remove_reader(connection._socket)
        assert await points.store(point("short", 2))

    with_points(database, test)
    assert len(tracking.metrics.history("short", "loss", 10).points) == 3


@on_postgresql
def test_cancelled_call_leaves_its_answer_to_no_later_call(database: Database, tracking: Tracking) -> None:
    tracking.run_data.log_metric("short", metric_point("loss", 1.0, 0, 0))

    async def test(points: SinglePointStore) -> None:
        assert await points.store(point("short", 1))
        with database.write() as holds_the_run:
            holds_the_run.exec_driver_sql("SELECT 1 FROM runs WHERE id = 'short' FOR UPDATE")
            call = asyncio.ensure_future(points.store(point("short", 2)))
            await asyncio.sleep(0.1)
            assert not await points.store(point("short", 3)), "one statement at a time"
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert not await points.store(point("unknown", 3)), "this is no answer to the one before"

    with_points(database, test)


def test_idle_writer_starts_no_thread_for_the_next_point(database: Database, tracking: Tracking) -> None:
    tracking.run_data.log_metric("short", metric_point("loss", 1.0, 0, 0))

    async def test(points: SinglePointStore) -> None:
        writer = RunWriter(database)
        await writer.store(point("short", 1))
        assert writer._thread is None
        await writer.store(point("short", 1, key="new"))
        assert writer._thread is not None
        await asyncio.to_thread(writer.close)

    with_points(database, test)
    assert len(tracking.metrics.history("short", "loss", 10).points) == 2


@on_sqlite
def test_fast_path_does_not_wait_for_another_writers_lock(database: Database, tracking: Tracking) -> None:
    tracking.run_data.log_metric("short", metric_point("loss", 1.0, 0, 0))

    async def test(points: SinglePointStore) -> None:
        assert await points.store(point("short", 1))
        with database.write():
            # Waiting would deadlock: the holder of the lock waits here.
            assert not await points.store(point("short", 2))
        assert await points.store(point("short", 2))

    with_points(database, test)
    assert len(tracking.metrics.history("short", "loss", 10).points) == 3


@on_sqlite
def test_write_ahead_log_size_is_bounded(database: Database, tracking: Tracking) -> None:
    assert database.engine.url.database
    log = Path(f"{database.engine.url.database}-wal")

    async def test(_: SinglePointStore) -> None:
        writer = RunWriter(database)
        counted = make_tally(AuditedCall("ann", "default", (), "POST", "/log", ("run:short",), 200, "127.0.0.1", 0.0))
        sizes = []
        for step in range(8 * CHECKPOINT_INTERVAL):
            await writer.store(point("short", step).with_tally(counted))
            sizes.append(log.stat().st_size)
        await asyncio.to_thread(writer.close)
        assert max(sizes) == sizes[-1] > 1000 * 4096, "it was long enough to be checkpointed"
        # Equal to a few pages only: the number of index splits varies between rounds.
        assert sizes[-1] - sizes[4 * CHECKPOINT_INTERVAL] < 10 * 4096, "and was restarted since"

    with_points(database, test)
    assert len(tracking.metrics.history("short", "loss", 10_000).points) == 8 * CHECKPOINT_INTERVAL


def test_concurrent_writers_neither_lose_nor_duplicate_points(database: Database, tracking: Tracking) -> None:
    """Two servers write the same points to one series at the same time."""

    async def test(points: SinglePointStore) -> None:
        writers = [RunWriter(database), RunWriter(database)]

        async def client(writer: RunWriter, first: int) -> None:
            for step in range(first, 120):
                await writer.store(point("short", step))

        await asyncio.gather(*(client(writer, first) for writer in writers for first in (0, 40)))
        for writer in writers:
            await asyncio.to_thread(writer.close)

    with_points(database, test)
    assert [each.step for each in tracking.metrics.history("short", "loss", 1000).points] == list(range(120))
    assert tracking.run_search.get(tracking.runs.get("short")).metrics[0].step == 119
