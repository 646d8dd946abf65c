"""Frequent queries read an index in the returned order, without sorting.

A page therefore costs the same among ten rows and among a million.
"""

import pytest
from sqlalchemy import select, update

from resources.metadata.audit_log import AuditedCall, list_calls, record_calls
from resources.metadata.database import Database
from resources.metadata.jobs import Jobs
from resources.metadata.tables import events
from tests.support.resources.query_plans import plans


def sorts(plan: str) -> bool:
    return "TEMP B-TREE" in plan or "Sort" in plan


@pytest.fixture
def jobs(database: Database) -> Jobs:
    jobs = Jobs(database)
    for number in range(5):
        jobs.submit(name="n", config={}, user="ann", organization="default", id=f"j{number}")
    return jobs


@pytest.mark.parametrize("status", [None, "queued"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "next"])
def test_a_page_of_jobs_is_read_from_an_index(database: Database, jobs: Jobs, status: str | None, is_first: bool) -> None:
    token = None if is_first else jobs.page("default", status, limit=2)[1]
    plan = plans(database, lambda: jobs.page("default", status, limit=2, page_token=token))
    assert ("jobs_by_organization_and_status" if status else "jobs_by_organization") in plan
    assert not sorts(plan), plan
    # Deletion is looked up for the returned jobs only, and not for all jobs that ever existed.
    assert "events_by_key" in plan, plan


def test_start_of_a_job_is_read_from_the_index_of_its_events(database: Database, jobs: Jobs) -> None:
    with database.read() as connection:
        job = jobs.get("j1", connection)
    for ask in (jobs.last_started_at, lambda job, connection: jobs.resumed_at(job.id, connection)):
        with database.read() as connection:
            assert "events_by_key" in plans(database, lambda ask=ask, reader=connection: ask(job, reader))


def test_calls_of_one_user_are_read_from_an_index(database: Database) -> None:
    def call(user: str) -> AuditedCall:
        return AuditedCall(user, "o", (), "POST", "/v1/jobs", (), 201, "c", 1.0)

    def found(user: str, type: str | None = None) -> list[str]:
        with database.read() as connection:
            return [each.payload["user"] for each in list_calls(connection, "o", user=user, type=type, limit=2)]

    long = "a" * 300
    with database.write() as connection:
        record_calls(connection, [call("ann"), call("bob"), call("ann"), call("ann"), call(long), call(long + "b")])
    assert found("ann") == ["ann", "ann"]
    assert found(long) == [long]
    assert found("ann", type="artifact.broken") == []
    plan = plans(database, lambda: found("bob"))
    assert "events_by_key" in plan and not sorts(plan), plan


def test_calls_since_a_time_are_read_without_earlier_ones(database: Database) -> None:
    times = [1000, 2000, 9000, 3000, 4000, 5000]  # the third with a wrong clock
    with database.write() as connection:
        record_calls(connection, [AuditedCall("ann", "o", (), "POST", "/v1/jobs", (), 201, "c", 1.0) for _ in times])
        numbers = list(connection.execute(select(events.c.seq).order_by(events.c.seq)).scalars())
        for seq, time in zip(numbers, times, strict=True):
            connection.execute(update(events).where(events.c.seq == seq).values(created_at=time))

    def found(since: int, after: int = 0, user: str | None = None) -> list[int]:
        with database.read() as connection:
            return [call.created_at for call in list_calls(connection, "o", since=since, after=after, user=user, limit=2)]

    assert (found(0), found(2000), found(3000), found(4500)) == ([1000, 2000], [2000, 9000], [9000, 3000], [9000, 5000])
    assert (found(3000, after=numbers[2]), found(4500, after=numbers[2], user="ann")) == ([3000, 4000], [5000])
    assert (found(9001), found(5000, after=numbers[5])) == ([], [])
    plan = plans(database, lambda: found(4500))
    assert "events_by_time" in plan, plan
    assert "events_pkey" in plan or not sorts(plan), plan  # PostgreSQL prefers to sort a table this small
