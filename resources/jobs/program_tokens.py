"""Tokens of programs on a cluster: issue, find, renew and revoke.

Every submitted program has one, also those without a tracking run (prepare, split, evaluate, convert). It authenticates the
program's pods at `/v1/jobs/{job_id}/programs/{program}`. For a job with tracking the same token is also a job token, which
the MLflow routes accept (`resources.jobs.job_tokens`).

One token serves all attempts: pods of a later attempt read the same Secret. Writes of an outdated attempt are refused by its
number instead (`api.routes.v1.job_objects`).
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select, update

from recipes.contracts.job import Job, Program
from recipes.contracts.quantities import parse_duration
from resources.jobs.job_tokens import GRACE_SECONDS, TOKEN_PREFIX, TOKEN_VARIABLE, hash_token
from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.ownership import find_file_organization
from resources.metadata.tables import cluster_jobs, job_tokens, jobs
from resources.metadata.tables import program_tokens as table


@dataclass(frozen=True)
class ProgramGrant:
    """The program that a token belongs to.

    Args:
        user_id: who submitted the job; empty for programs without a row in `jobs`.
        job: the document as submitted.
        generation: of the row in `cluster_jobs`; pods of an older one are being replaced.
        wanted: run | cancel.
    """

    job_id: str
    program: Program
    organization: str
    user_id: str
    job: Job
    generation: int
    wanted: str


def issue_token(connection: Connection, job: Job) -> str:
    """Issue a token for all attempts of a job's program.

    Earlier tokens stay valid, because running pods may have read one. `revoke_tokens` ends all of them.
    """
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    sha256, expires_at = hash_token(token), _expiry(job)
    connection.execute(insert(table).values(sha256=sha256, job_id=job.id, program=job.program.value, expires_at=expires_at))
    if job.tracking is not None:
        connection.execute(insert(job_tokens).values(sha256=sha256, job_id=job.id, expires_at=expires_at))
    return token


def renew_tokens(connection: Connection, job: Job) -> None:
    """Extend the validity of a program's tokens by the job's maximum duration."""
    expires_at = _expiry(job)
    mine = table.c.job_id == job.id, table.c.program == job.program.value
    connection.execute(update(table).where(*mine).values(expires_at=expires_at))
    if job.tracking is not None:
        connection.execute(update(job_tokens).where(job_tokens.c.job_id == job.id).values(expires_at=expires_at))


def revoke_tokens(connection: Connection, job: Job) -> None:
    """Revoke all tokens of a program."""
    connection.execute(delete(table).where(table.c.job_id == job.id, table.c.program == job.program.value))
    if job.tracking is not None:
        connection.execute(delete(job_tokens).where(job_tokens.c.job_id == job.id))


def withdraw_token(connection: Connection, token: str) -> None:
    """Revoke one token that was not handed out."""
    for each in (table, job_tokens):
        connection.execute(delete(each).where(each.c.sha256 == hash_token(token)))


def find_program(connection: Connection, token: str) -> ProgramGrant | None:
    """Return the program of a valid token; None if token or program does not exist."""
    same_program = (cluster_jobs.c.job_id == table.c.job_id) & (cluster_jobs.c.program == table.c.program)
    query = (
        select(cluster_jobs, jobs.c.organization, jobs.c.user_id)
        .join(table, same_program)
        .outerjoin(jobs, jobs.c.id == cluster_jobs.c.job_id)
        .where(table.c.sha256 == hash_token(token), table.c.expires_at > now_ms())
    )
    row = connection.execute(query).first()
    if row is None:
        return None
    job = Job.model_validate(row.document)
    return ProgramGrant(
        job_id=row.job_id,
        program=Program(row.program),
        organization=row.organization or output_organization(connection, job),
        user_id=row.user_id or "",
        job=job,
        generation=row.generation,
        wanted=row.wanted,
    )


def output_organization(connection: Connection, job: Job) -> str:
    """Return the organization of a job's outputs, for jobs without a row; "" if unowned."""
    owners = (find_file_organization(connection, uri) for uri in (*job.outputs.values(), job.result_uri))
    return next(filter(None, owners), "")


def _expiry(job: Job) -> int:
    return now_ms() + int((parse_duration(job.schedule.max_duration) + GRACE_SECONDS) * 1000)


@dataclass(frozen=True)
class ClusterCredentials:
    """Credentials of programs on a cluster: one token for all attempts (`resources.compute.credentials`)."""

    database: Database

    def issue(self, job: Job) -> Mapping[str, str]:
        with self.database.write() as connection:
            return {TOKEN_VARIABLE: issue_token(connection, job)}

    def withdraw(self, token: str) -> None:
        """Revoke one token that was not handed out."""
        with self.database.write() as connection:
            withdraw_token(connection, token)

    def is_valid(self, job: Job, token: str) -> bool:
        """Whether the token is this program's. Its row in `cluster_jobs` need not exist yet."""
        query = select(table.c.sha256).where(
            table.c.sha256 == hash_token(token),
            table.c.job_id == job.id,
            table.c.program == job.program.value,
            table.c.expires_at > now_ms(),
        )
        with self.database.read() as connection:
            return connection.execute(query).first() is not None

    def renew(self, job: Job) -> None:
        with self.database.write() as connection:
            renew_tokens(connection, job)

    def revoke(self, job: Job) -> None:
        with self.database.write() as connection:
            revoke_tokens(connection, job)
