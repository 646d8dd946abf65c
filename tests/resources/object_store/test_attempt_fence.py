"""Attempt fencing: writes of older attempts are refused, and writes delay new claims."""

from collections.abc import Iterator

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from recipes.contracts.job import Job, Program, StoreAddress
from resources.errors import HanzoError
from resources.jobs.program_tokens import ProgramGrant
from resources.metadata.database import Database
from resources.metadata.tables import cluster_jobs
from resources.object_store.attempt_fence import check_attempt, hold_attempt
from tests.resources.cluster_rows import claim_attempt, submit_program
from tests.resources.metadata.conftest import database, database_url
from tests.support.postgres_server import migrated_sqlite, postgres, postgres_url, sqlite_url

__all__ = ["database", "database_url", "migrated_sqlite", "postgres", "postgres_url", "sqlite_url"]

JOB = Job(
    id="j",
    program=Program.CONVERT,
    result_uri="s3://hanzo-ml/runs/j/convert.json",
    store=StoreAddress(root="http://s3", buckets={}),
    cache_dir="/cache",
)
GRANT = ProgramGrant(JOB.id, JOB.program, "default", "", JOB, 1, "run")


@pytest.fixture
def submitted(database: Database) -> Iterator[Database]:
    submit_program(database, JOB)
    yield database


def test_older_attempt_is_refused_and_the_newest_is_not(submitted: Database) -> None:
    check_attempt(submitted, GRANT, 0)
    for attempt in (1, 2):
        claim_attempt(submitted, JOB, attempt)
    for attempt in (0, 1):
        with pytest.raises(HanzoError, match=f"attempt {attempt} of convert is over") as refused:
            check_attempt(submitted, GRANT, attempt)
        assert refused.value.status == 409
        with pytest.raises(HanzoError), hold_attempt(submitted, GRANT, attempt):
            pytest.fail("the block of an older attempt ran")
    with hold_attempt(submitted, GRANT, 2):
        pass


def test_no_attempt_is_claimed_while_a_write_is_under_way(submitted: Database) -> None:
    if submitted.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no row locks")
    claim = select(cluster_jobs).where(cluster_jobs.c.job_id == JOB.id).with_for_update(nowait=True)
    with hold_attempt(submitted, GRANT, 0):
        with pytest.raises(OperationalError, match="could not obtain lock"), submitted.write() as connection:
            connection.execute(claim)
        with submitted.write() as connection:  # the controller is not blocked
            connection.execute(update(cluster_jobs).values(phase="running"))
        with hold_attempt(submitted, GRANT, 0):  # and neither is another write
            pass
    with submitted.write() as connection:
        assert connection.execute(claim).one().phase == "running"
