"""Program tokens: only in its environment, new at each start, revoked at its end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import Job, Tracking
from resources.compute.local.backend import LocalCompute
from resources.jobs import job_tokens
from resources.jobs.job_tokens import TOKEN_PREFIX, TOKEN_VARIABLE, JobCredentials, JobGrant
from resources.metadata.database import Database
from resources.metadata.jobs import Jobs
from resources.stack.detached_process import LOG_FILE, PID_FILE
from tests.resources.metadata.conftest import database, database_url
from tests.support.postgres_server import migrated_sqlite, postgres, postgres_url, sqlite_url
from tests.support.resources.local_backend import Watcher, job_that, kill, let_finish, source, starts, until

__all__ = ["database", "database_url", "job_that", "migrated_sqlite", "postgres", "postgres_url", "source", "sqlite_url"]

SOMEBODYS = "the-token-of-whoever-started-the-stack"


@pytest.fixture
def compute(source: Path, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalCompute:
    monkeypatch.setenv(TOKEN_VARIABLE, SOMEBODYS)
    credentials = JobCredentials(database)
    return LocalCompute(tmp_path / "jobs", source=source, max_restarts=2, poll_seconds=0.02, credentials=credentials)


@pytest.fixture
def tracked(job_that: Callable[..., Job], database: Database) -> Job:
    """Return a recorded job that logs to its run."""
    Jobs(database).submit(name="j", config={"dataset": "corpus@1"}, user="ann", organization="acme", id="job-1")
    return job_that("wait", tracking=Tracking(uri="http://127.0.0.1:1", run_id="job-1"))


def token_of(job: Job) -> str:
    """Return the token in the environment of the job's running program."""
    process = json.loads((Path(job.work_dir) / PID_FILE).read_text())
    variables = Path(f"/proc/{process}/environ").read_text().split("\0")
    [value] = [text.partition("=")[2] for text in variables if text.startswith(f"{TOKEN_VARIABLE}=")]
    return value


def good_for(database: Database, token: str) -> JobGrant | None:
    with database.read() as connection:
        return job_tokens.find_grant(connection, token)


def test_each_start_of_a_program_gets_a_token_that_replaces_the_previous_one(
    compute: LocalCompute, tracked: Job, database: Database
) -> None:
    compute.submit(tracked)
    until("its start", lambda: starts(tracked) == 1)
    first = token_of(tracked)
    assert first.startswith(TOKEN_PREFIX)
    grant = good_for(database, first)
    assert grant is not None and (grant.run_id, grant.organization, grant.user_id) == ("job-1", "acme", "ann")
    assert (grant.dataset, grant.models) == ("corpus@1", ("j",))
    kill(tracked)
    until("its second start", lambda: compute.observe(tracked) and starts(tracked) == 2)
    second = token_of(tracked)
    assert good_for(database, first) is None and good_for(database, second) == grant
    let_finish(tracked)
    compute.run(tracked, Watcher().follower)
    assert good_for(database, second) is None
    written = [path.read_text(errors="replace") for path in Path(tracked.work_dir).rglob("*") if path.is_file()]
    assert any("finishing" in text for text in written) and (Path(tracked.work_dir) / LOG_FILE).is_file()
    with database.read() as connection:
        written.append(str(connection.exec_driver_sql("SELECT * FROM job_tokens").all()))
        written.append(str(connection.exec_driver_sql("SELECT * FROM events").all()))
    assert not any(token in text for token in (first, second, SOMEBODYS) for text in written)


def test_a_program_without_tracking_has_no_token_at_all(compute: LocalCompute, job_that: Any) -> None:
    job = job_that("wait")
    compute.submit(job)
    until("its start", lambda: starts(job) == 1)
    assert token_of(job) == ""
    let_finish(job)
    compute.run(job, Watcher().follower)


def test_token_stays_valid_while_it_is_renewed(tracked: Job, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000_000
    monkeypatch.setattr(job_tokens, "now_ms", lambda: now)
    credentials = JobCredentials(database)
    token = credentials.issue(tracked)[TOKEN_VARIABLE]
    now += 48 * 3_600_000
    assert good_for(database, token) is not None
    credentials.renew(tracked)
    now += 49 * 3_600_000 - 1
    assert good_for(database, token) is not None
    now += 1
    assert good_for(database, token) is None


def test_unrevoked_token_expires_after_its_job_ended(
    tracked: Job, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = JobCredentials(database).issue(tracked)[TOKEN_VARIABLE]
    ended = Jobs(database).cancel(tracked.id).ended_at
    assert ended is not None and good_for(database, token) is not None, "it saves what it has"
    monkeypatch.setattr(job_tokens, "now_ms", lambda: ended + job_tokens.GRACE_SECONDS * 1000)
    assert good_for(database, token) is None
