"""Tokens of cluster programs, with SQLite and PostgreSQL."""

import pytest

from recipes.contracts.job import Job, Program, StoreAddress, Tracking
from resources.jobs import job_tokens, program_tokens
from resources.jobs.job_tokens import TOKEN_PREFIX, TOKEN_VARIABLE
from resources.jobs.program_tokens import ClusterCredentials, ProgramGrant
from resources.metadata.database import Database
from resources.metadata.jobs import Jobs
from tests.resources.cluster_rows import submit_program
from tests.resources.metadata.conftest import database, database_url
from tests.support.postgres_server import migrated_sqlite, postgres, postgres_url, sqlite_url

__all__ = ["database", "database_url", "migrated_sqlite", "postgres", "postgres_url", "sqlite_url"]

STORE = StoreAddress(root="http://s3:9000", buckets={"datasets": "d", "checkpoints": "c", "models": "m"})
TRAIN = Job(
    id="job-1",
    program=Program.TRAIN,
    result_uri="s3://hanzo-ml/runs/job-1/train.json",
    store=STORE,
    cache_dir="/cache",
    tracking=Tracking(uri="http://127.0.0.1:1", run_id="job-1"),
)
PREPARE = Job(
    id="prepare-d-1",
    program=Program.PREPARE,
    outputs={"train": "s3://hanzo-ml/datasets/@acme/d/prepared/train"},
    result_uri="s3://hanzo-ml/datasets/@acme/d/prepared/result.json",
    store=STORE,
    cache_dir="/cache",
)


@pytest.fixture
def credentials(database: Database) -> ClusterCredentials:
    return ClusterCredentials(database)


def issue(credentials: ClusterCredentials, job: Job) -> str:
    return credentials.issue(job)[TOKEN_VARIABLE]


def find(database: Database, token: str) -> ProgramGrant | None:
    with database.read() as connection:
        return program_tokens.find_program(connection, token)


def test_token_identifies_program_and_its_document(database: Database, credentials: ClusterCredentials) -> None:
    submit_program(database, PREPARE, generation=3, wanted="cancel")
    token = issue(credentials, PREPARE)
    grant = find(database, token)
    assert token.startswith(TOKEN_PREFIX) and grant is not None
    assert (grant.job_id, grant.program, grant.job) == (PREPARE.id, Program.PREPARE, PREPARE)
    assert (grant.organization, grant.generation, grant.wanted) == ("acme", 3, "cancel")
    assert find(database, token + "x") is None


@pytest.mark.parametrize(
    ("output", "organization"),
    [
        ("s3://hanzo-ml/runs/job-1/evaluation", "acme"),
        ("s3://hanzo-ml/datasets/@rival/d/1/splits/s/train", "rival"),
        ("s3://hanzo-models/@acme%20%26%20co/m/1/safetensors", "acme & co"),
        ("s3://hanzo-models/m/1/safetensors", "default"),
        ("s3://hanzo-ml/runs/nobodys/evaluation", ""),
    ],
)
def test_programs_without_a_job_of_their_own_belong_to_the_owner_of_their_outputs(
    database: Database, credentials: ClusterCredentials, output: str, organization: str
) -> None:
    Jobs(database).submit(name="j", config={"dataset": "c@1"}, user="ann", organization="acme", id="job-1")
    made = {"id": "evaluate-job-1", "program": Program.EVALUATE, "outputs": {"made": output}}
    job = PREPARE.model_copy(update={**made, "result_uri": f"{output}.json"})
    submit_program(database, job)
    grant = find(database, issue(credentials, job))
    assert grant is not None and grant.organization == organization


def test_token_of_job_with_tracking_is_a_job_token_too(database: Database, credentials: ClusterCredentials) -> None:
    Jobs(database).submit(name="j", config={"dataset": "c@1"}, user="ann", organization="acme", id="job-1")
    submit_program(database, TRAIN)
    token = issue(credentials, TRAIN)
    grant = find(database, token)
    with database.read() as connection:
        job_grant = job_tokens.find_grant(connection, token)
    assert grant is not None and job_grant is not None
    assert (grant.organization, grant.user_id, job_grant.run_id) == ("acme", "ann", "job-1")


def test_token_stays_valid_when_another_is_issued(database: Database, credentials: ClusterCredentials) -> None:
    submit_program(database, PREPARE)
    first, second = issue(credentials, PREPARE), issue(credentials, PREPARE)
    assert find(database, first) == find(database, second) is not None


def test_token_is_valid_for_its_own_program_only(database: Database, credentials: ClusterCredentials) -> None:
    token = issue(credentials, PREPARE)
    assert credentials.is_valid(PREPARE, token), "before the program is submitted, too"
    assert not credentials.is_valid(PREPARE.model_copy(update={"id": "other"}), token)
    assert not credentials.is_valid(PREPARE.model_copy(update={"program": Program.SPLIT}), token)


def test_revoked_token_is_void_for_both_kinds_of_routes(database: Database, credentials: ClusterCredentials) -> None:
    Jobs(database).submit(name="j", config={"dataset": "c@1"}, user="ann", organization="acme", id="job-1")
    submit_program(database, TRAIN)
    token = issue(credentials, TRAIN)
    credentials.revoke(TRAIN)
    with database.read() as connection:
        assert job_tokens.find_grant(connection, token) is None
    assert find(database, token) is None and not credentials.is_valid(TRAIN, token)


def test_expired_token_is_void_until_it_is_renewed(
    database: Database, credentials: ClusterCredentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_program(database, PREPARE)
    token = issue(credentials, PREPARE)
    later = program_tokens.now_ms() + 72 * 3600 * 1000
    monkeypatch.setattr(program_tokens, "now_ms", lambda: later)
    assert find(database, token) is None
    credentials.renew(PREPARE)
    assert find(database, token) is not None
