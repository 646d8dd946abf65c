"""Tokens of jobs: what a training program signs in with, instead of with somebody's own token.

A token is random and only its hash is kept, so that nothing in the database or its backups signs in, and no key has to be
handed to every server, kept and rotated; in exchange each check is a look at the row, which is also what makes revoking
one immediate. It belongs to the program's present start: the next start has another, and the one before is void.

It lives as long as the job may run, and a grace; whoever supervises the job pushes that forward, so that a job without a
limit goes on for days, and one whose supervisor died is not cut off before its own time is over.
"""

import hashlib
import secrets
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, or_, select, update

from resources.metadata.outbox import now_ms
from resources.metadata.tables import job_tokens as table
from resources.metadata.tables import jobs, runs

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


def issue(connection: Connection, job_id: str, seconds: float) -> str:
    """A new token for a job, good for so long and the grace; those that it had are void."""
    revoke(connection, job_id)
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    connection.execute(insert(table).values(sha256=hash_token(token), job_id=job_id, expires_at=_end(seconds)))
    return token


def renew(connection: Connection, job_id: str, seconds: float) -> None:
    """Push the end of a job's token forward."""
    connection.execute(update(table).where(table.c.job_id == job_id).values(expires_at=_end(seconds)))


def revoke(connection: Connection, job_id: str) -> None:
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
