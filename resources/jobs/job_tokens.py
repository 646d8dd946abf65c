"""Tokens by which job programs authenticate: issue, verify, renew and revoke."""

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

# Tokens of jobs, by which a training program authenticates instead of with a user's token.
#
# Tokens are random, and only their hash is stored: neither the database nor its backups contain usable credentials, and no
# signing key has to be distributed, stored and rotated. In return, each check reads a row, which also makes revocation
# immediate. A token belongs to one start of the program: the next start gets another, which invalidates it.
#
# It is valid for the job's maximum duration plus a grace period. The job's supervisor extends it, so that a job without a
# limit can run for days, and a job whose supervisor died keeps its token until its own time is over.

TOKEN_PREFIX = "hanzo-ml-job-"
"""Prefix of every token: servers distinguish it from an identity provider's, and secret scanners detect it."""
GRACE_SECONDS = 3600
"""Added to the job's time, and valid after its end: a cancelled program still saves its state."""


@dataclass(frozen=True)
class JobGrant:
    """The job of a token, which may write only to its run and outputs."""

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
    """Issue a token for a job, valid for `seconds` plus the grace; revoke others."""
    revoke_token(connection, job_id)
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    connection.execute(insert(table).values(sha256=hash_token(token), job_id=job_id, expires_at=_end(seconds)))
    return token


def renew_token(connection: Connection, job_id: str, seconds: float) -> None:
    """Extend the validity of a job's token."""
    connection.execute(update(table).where(table.c.job_id == job_id).values(expires_at=_end(seconds)))


def revoke_token(connection: Connection, job_id: str) -> None:
    connection.execute(delete(table).where(table.c.job_id == job_id))


def find_grant(connection: Connection, token: str) -> JobGrant | None:
    """Return what a token grants; None if unknown, revoked, expired or its job ended."""
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


# Credentials of a job's program at the tracking server: its own token, never that of the user who started the stack.

TOKEN_VARIABLE = "MLFLOW_TRACKING_TOKEN"
"""Variable read by both the product's client and MLflow's."""


@dataclass(frozen=True)
class JobCredentials:
    """Issues tokens at each start of a program, passed only in its environment."""

    database: Database

    def issue(self, job: Job) -> Mapping[str, str]:
        if job.tracking is None:
            return {TOKEN_VARIABLE: ""}  # a program without tracking must not inherit another token
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
