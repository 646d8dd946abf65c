"""GPU usage records as an attempt of a job leaves them."""

import uuid

from recipes.contracts.job import Program
from resources.compute.base import JobRef
from resources.metadata.database import Database
from resources.metadata.gpu_usage import close_usage, extend_usage, open_usage


def meter_attempt(
    database: Database, job: str, hours: float, gpus: int = 1, gpu_type: str | None = None, *, ends: bool = True
) -> None:
    """Record an attempt of a job or command that held GPUs for some hours."""
    attempt = JobRef(job, Program.TRAIN)
    with database.write() as connection:
        open_usage(connection, attempt, uuid.uuid4().hex, gpus, gpu_type, 0)
        extend_usage(connection, attempt, int(hours * 3_600_000))
        if ends:
            close_usage(connection, attempt)
