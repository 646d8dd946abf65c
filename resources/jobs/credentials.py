"""What a job's program signs in with at the tracking server: a token of its own, never that of whoever started the stack."""

from collections.abc import Mapping
from dataclasses import dataclass

from recipes.contracts.job import Job
from recipes.contracts.quantities import parse_duration
from resources.metadata import job_tokens
from resources.metadata.database import Database

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
            return {TOKEN_VARIABLE: job_tokens.issue(connection, job.id, parse_duration(job.schedule.max_duration))}

    def is_valid(self, job: Job, token: str) -> bool:
        with self.database.read() as connection:
            grant = job_tokens.find_grant(connection, token)
        return grant is not None and grant.job_id == job.id

    def renew(self, job: Job) -> None:
        if job.tracking is not None:
            with self.database.write() as connection:
                job_tokens.renew(connection, job.id, parse_duration(job.schedule.max_duration))

    def revoke(self, job: Job) -> None:
        if job.tracking is not None:
            with self.database.write() as connection:
                job_tokens.revoke(connection, job.id)
