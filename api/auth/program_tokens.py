"""Authenticate the pods of a program on a cluster by the program's own token.

Routes below `/v1/jobs/{job_id}/programs/{program}` are declared with `PROGRAM` in place of a permission: they accept only
this token, with and without sign-in. Access control authenticates; endpoints take the grant as `ProgramGrantDep`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from api.auth.job_tokens import job_token
from api.auth.permissions import JOB, Caller
from resources.errors import ErrorCode, HanzoError
from resources.jobs.job_tokens import hash_token
from resources.jobs.program_tokens import ProgramGrant, find_program
from resources.metadata.database import Database

CACHE_SECONDS = 5.0
"""How long a lookup is cached: a revoked token, or a cancellation, takes effect within this time."""
MAX_CACHED = 2048


@dataclass(frozen=True)
class CachedGrant:
    grant: ProgramGrant
    at: float


class ProgramTokens:
    """Finds the program that a token belongs to."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cached: dict[str, CachedGrant] = {}

    async def find(self, authorization: str | None) -> ProgramGrant | None:
        """Return the grant of an `Authorization` header; None without a valid token of a program."""
        token = job_token(authorization)
        if token is None:
            return None
        key = hash_token(token)
        known = self._cached.get(key)
        if known is not None and time.monotonic() - known.at < CACHE_SECONDS:
            return known.grant
        grant = await run_in_threadpool(self._look_up, token)
        if grant is None:
            self._cached.pop(key, None)
            return None
        if len(self._cached) >= MAX_CACHED:
            self._cached.clear()
        self._cached[key] = CachedGrant(grant, time.monotonic())
        return grant

    def _look_up(self, token: str) -> ProgramGrant | None:
        with self._database.read() as connection:
            return find_program(connection, token)


def program_caller(grant: ProgramGrant) -> Caller:
    """Return the caller to record for a program: its job's user, as a job."""
    return Caller(user_id=grant.user_id or f"job {grant.job_id}", organization=grant.organization, roles=frozenset({JOB}))


def check_same_program(grant: ProgramGrant, path: Mapping[str, str]) -> None:
    """Raise a 403 if the path names another program than the token's."""
    if (path.get("job_id"), path.get("program")) != (grant.job_id, grant.program.value):
        message = f"This token belongs to {grant.program} of job '{grant.job_id}': use the addresses of that program"
        raise HanzoError(ErrorCode.PERMISSION_DENIED, message)


def not_a_program() -> HanzoError:
    """Return the error for a caller authenticated otherwise."""
    return HanzoError(ErrorCode.PERMISSION_DENIED, "Only the job's own pods may do this, with the token of their program")


def no_program_token() -> HanzoError:
    message = "The token is missing or refused: this call requires the token of a submitted program that has not ended"
    return HanzoError(ErrorCode.UNAUTHENTICATED, message)


async def program_grant(request: Request) -> ProgramGrant:
    # Set by access control; without it the call fails.
    found: ProgramGrant = request.state.program_grant
    return found


ProgramGrantDep = Annotated[ProgramGrant, Depends(program_grant)]
