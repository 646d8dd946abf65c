"""Fence off older attempts of a program.

Their writes are refused once a newer attempt has begun. A pod that lost its network, or ends within its grace period, may
still write while its successor runs.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, func, select

from resources.errors import conflict
from resources.jobs.program_tokens import ProgramGrant
from resources.metadata.database import Database
from resources.metadata.tables import cluster_jobs, job_attempts

MAX_HELD = threading.BoundedSemaphore(4)
"""Attempts that are held at the same time. Each uses a pooled connection until the object store answers; if the store is
slow, other requests need the rest.
"""


def check_attempt(database: Database, grant: ProgramGrant, attempt: int) -> None:
    """Check that an attempt is the newest. Raises HanzoError: 409 for an older one."""
    with database.read() as connection:
        refuse_older(connection, grant, attempt)


@contextmanager
def hold_attempt(database: Database, grant: ProgramGrant, attempt: int) -> Iterator[None]:
    """Check the attempt, and prevent a newer one from being claimed until the block ends.

    On PostgreSQL this is a key share lock on the program's row in `cluster_jobs`: a claim locks the row FOR UPDATE, and
    other updates of it are not blocked. SQLite has no row locks: there a claim may succeed in between.

    Raises:
        HanzoError: 409 for an attempt that is older than the newest one.
    """
    if database.engine.dialect.name == "sqlite":
        check_attempt(database, grant, attempt)
        yield
        return
    mine = cluster_jobs.c.job_id == grant.job_id, cluster_jobs.c.program == grant.program.value
    with MAX_HELD, database.write() as connection:
        connection.execute(select(cluster_jobs.c.job_id).where(*mine).with_for_update(read=True, key_share=True))
        refuse_older(connection, grant, attempt)
        yield


def refuse_older(connection: Connection, grant: ProgramGrant, attempt: int) -> None:
    mine = job_attempts.c.job_id == grant.job_id, job_attempts.c.program == grant.program.value
    newest = connection.execute(select(func.max(job_attempts.c.attempt)).where(*mine)).scalar() or 0
    if attempt < newest:
        raise conflict(f"attempt {attempt} of {grant.program} is over: attempt {newest} has begun, and only it may write")
