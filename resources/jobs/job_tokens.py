"""Tokens that job programs sign in with: issue, verify, renew and revoke."""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, or_, select, update

from recipes.contracts.job import Job
from recipes.contracts.quantities import parse_duration
from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.tables import job_tokens as table
from resources.metadata.tables import jobs, runs

# Tokens of jobs: what a training program signs in with, instead of with somebody's own token.
#
# A token is random and only its hash is kept, so that nothing in the database or its backups signs in, and no key has to
# be handed to every server, kept and rotated; in exchange each check is a look at the row, which is also what makes
# revoking one immediate. It belongs to the program's present start: the next start has another, and the one before is
# void.
#
# It lives as long as the job may run, and a grace; whoever supervises the job pushes that forward, so that a job without
# a limit goes on for days, and one whose supervisor died is not cut off before its own time is over.

TOKEN_PREFIX = "hanzo-ml-job-"
"""How every one begins: servers tell it from an IAM's token, scanners find it where it must not be."""
GRACE_SECONDS = 3600
"""Beyond the job's time, and beyond its end: a cancelled program still saves what it has."""


@dataclass(frozen=True)
class JobGrant:
    """The job that a token is of. Its run, and what the run made, is all that it may write to."""

    job_id: str
    user_id: str
    organization: str
    experiment_id: int
    dataset: str
    models: tuple[str, ...]

    @property
    def run_id(self) -> str:
        return self.job_id


def issue_token(connection: Connection, job_id: str, seconds: float) -> str:
    """A new token for a job, good for so long and the grace; those that it had are void."""
    revoke_token(connection, job_id)
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    connection.execute(insert(table).values(sha256=hash_token(token), job_id=job_id, expires_at=_end(seconds)))
    return token


def renew_token(connection: Connection, job_id: str, seconds: float) -> None:
    """Push the end of a job's token forward."""
    connection.execute(update(table).where(table.c.job_id == job_id).values(expires_at=_end(seconds)))


def revoke_token(connection: Connection, job_id: str) -> None:
    connection.execute(delete(table).where(table.c.job_id == job_id))


def find_grant(connection: Connection, token: str) -> JobGrant | None:
    """What a token is good for now; None where it is unknown, revoked or expired, or its job ended a while ago."""
    now = now_ms()
    query = (
        select(jobs.c.id, jobs.c.user_id, jobs.c.organization, jobs.c.config, jobs.c.name, runs.c.experiment_id)
        .join(table, table.c.job_id == jobs.c.id)
        .join(runs, runs.c.id == jobs.c.id)
        .where(
            table.c.sha256 == hash_token(token),
            table.c.expires_at > now,
            or_(jobs.c.ended_at.is_(None), jobs.c.ended_at > now - GRACE_SECONDS * 1000),
        )
    )
    row = connection.execute(query).first()
    if row is None:
        return None
    return JobGrant(
        job_id=row.id,
        user_id=row.user_id,
        organization=row.organization,
        experiment_id=row.experiment_id,
        dataset=str(row.config.get("dataset", "")),
        models=tuple(dict.fromkeys((row.name, str(row.config.get("model", row.name))))),
    )


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _end(seconds: float) -> int:
    return now_ms() + int((seconds + GRACE_SECONDS) * 1000)


# What a job's program signs in with at the tracking server: a token of its own, never that of whoever started the stack.

TOKEN_VARIABLE = "MLFLOW_TRACKING_TOKEN"
"""The variable that the product's own client and MLflow's both read."""


@dataclass(frozen=True)
class JobCredentials:
    """Issued at each start of a program, handed over in its environment; neither the job file nor a log holds it."""

    database: Database

    def issue(self, job: Job) -> Mapping[str, str]:
        if job.tracking is None:
            return {TOKEN_VARIABLE: ""}  # it has nothing to tell the server, and inherits no other token
        with self.database.write() as connection:
            return {TOKEN_VARIABLE: issue_token(connection, job.id, parse_duration(job.schedule.max_duration))}

    def is_valid(self, job: Job, token: str) -> bool:
        with self.database.read() as connection:
            grant = find_grant(connection, token)
        return grant is not None and grant.job_id == job.id

    def renew(self, job: Job) -> None:
        if job.tracking is not None:
            with self.database.write() as connection:
                renew_token(connection, job.id, parse_duration(job.schedule.max_duration))

    def revoke(self, job: Job) -> None:
        if job.tracking is not None:
            with self.database.write() as connection:
                revoke_token(connection, job.id)
