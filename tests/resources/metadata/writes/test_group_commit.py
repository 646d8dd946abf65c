"""Group commit thread: every write is answered after its commit or with an error."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from sqlalchemy.exc import OperationalError

from resources.errors import ErrorCode, HanzoError
from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.tracking.tracking import Tracking
from resources.metadata.writes import group_commit
from resources.metadata.writes.group_commit import RunWriter
from resources.metadata.writes.write_decisions import RunWrite, run_write

Test = Callable[[RunWriter], Awaitable[None]]


@pytest.fixture
def tracking(database: Database) -> Tracking:
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    tracking.runs.create(0, run_id="run")
    return tracking


def writing(database: Database, test: Test) -> None:
    """Run a test in an event loop with a writer, which is closed afterwards."""

    async def run() -> None:
        writer = RunWriter(database)
        try:
            await asyncio.wait_for(test(writer), 30)
        finally:
            await asyncio.to_thread(writer.close)

    asyncio.run(run())


def param(key: str, value: str, run: str = "run") -> RunWrite:
    return run_write(run, params=[(key, value)])


async def answers(writer: RunWriter, writes: Sequence[RunWrite]) -> list[BaseException | None]:
    return await asyncio.gather(*(writer.store(write) for write in writes), return_exceptions=True)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_transaction_with_a_lost_connection_raises_operational_error(database: Database) -> None:
    """Rollback must not use the lost connection: the response would be 500, not 503."""
    with pytest.raises(OperationalError), database.write() as connection, database.write() as other:
        [[pid]] = connection.exec_driver_sql("SELECT pg_backend_pid()")
        other.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")
        connection.exec_driver_sql("SELECT 1")
    with database.write() as connection:
        assert list(connection.exec_driver_sql("SELECT 1")) == [(1,)]


def test_refused_write_does_not_affect_the_other_writes(database: Database, tracking: Tracking) -> None:
    async def test(writer: RunWriter) -> None:
        writes = [param("a", "1"), param("x", "1", "unknown"), param("a", "2"), param("a", "1"), param("b", "3")]
        got = await answers(writer, writes)
        assert [None if answer is None else str(answer)[:30] for answer in got] == [
            None,
            "Run with id=unknown not found",
            "Changing param values is not a",
            None,
            None,
        ]

    writing(database, test)
    assert tracking.run_data.params("run") == {"a": "1", "b": "3"}


def test_acknowledged_write_can_be_read(database: Database, tracking: Tracking) -> None:
    async def test(writer: RunWriter) -> None:
        async def client(name: str) -> None:
            for step in range(20):
                await writer.store(run_write("run", [metric_point(name, 1.0, step, step)]))
                assert len(tracking.metrics.history("run", name, 100).points) == step + 1

        await asyncio.gather(*(client(f"m{number}") for number in range(4)))

    writing(database, test)


def test_closing_stores_waiting_writes_and_refuses_later_ones(database: Database, tracking: Tracking) -> None:
    async def test(writer: RunWriter) -> None:
        waiting = [asyncio.ensure_future(writer.store(param(f"p{number}", "1"))) for number in range(50)]
        await asyncio.sleep(0)
        await asyncio.to_thread(writer.close)
        await asyncio.gather(*waiting)
        with pytest.raises(HanzoError) as refusal:
            await writer.store(param("late", "1"))
        assert refusal.value.code is ErrorCode.TEMPORARILY_UNAVAILABLE

    writing(database, test)
    assert len(tracking.run_data.params("run")) == 50


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_death_of_the_writer_thread_fails_waiting_writes(
    database: Database, tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(writer: RunWriter) -> None:
        with monkeypatch.context() as patch:

            def die(*_: object, **__: object) -> None:
                raise SystemExit

            patch.setattr(group_commit, "write_group", die)
            got = await answers(writer, [param(f"p{number}", "1") for number in range(20)])
            assert all(isinstance(answer, HanzoError) for answer in got)
        await writer.store(param("after", "1"))

    writing(database, test)
    assert tracking.run_data.params("run") == {"after": "1"}


def test_row_refused_by_the_database_does_not_affect_the_other_rows(database: Database, tracking: Tracking) -> None:
    refuse = {
        "sqlite": "CREATE TRIGGER refuse BEFORE INSERT ON params WHEN NEW.key = 'bad' BEGIN SELECT RAISE(ABORT, 'no'); END",
        "postgresql": "ALTER TABLE params ADD CHECK (key <> 'bad')",
    }
    with database.write() as connection:
        connection.exec_driver_sql(refuse[connection.dialect.name])

    async def test(writer: RunWriter) -> None:
        got = await answers(writer, [param("a", "1"), param("bad", "1"), param("b", "1")])
        assert [answer is None for answer in got] == [True, False, True]

    writing(database, test)
    assert tracking.run_data.params("run") == {"a": "1", "b": "1"}


def test_writing_resumes_after_a_database_outage(database: Database, tracking: Tracking) -> None:
    def rename(old: str, new: str) -> None:
        with database.write() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {old} RENAME TO {new}")

    async def test(writer: RunWriter) -> None:
        await writer.store(param("a", "1"))
        rename("params", "gone")
        assert all(await answers(writer, [param("b", "1"), param("c", "1")]))
        rename("gone", "params")
        await writer.store(param("d", "1"))

    writing(database, test)
    assert tracking.run_data.params("run") == {"a": "1", "d": "1"}
