"""Object stores of programs in pods, accessed through a server with the program's token."""

import secrets
from collections.abc import Mapping

from recipes.contracts.job import Job, Program, StoreAddress
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.storage.signed_bucket import ATTEMPT_VARIABLE, TOKEN_VARIABLE
from resources.jobs.program_tokens import ClusterCredentials
from resources.metadata.database import Database
from tests.resources.cluster_rows import submit_program
from tests.support.server_process import ServerProcess


def program_job(
    server: ServerProcess,
    outputs: Mapping[str, str],
    inputs: Mapping[str, Artifact] | None = None,
    program: Program = Program.CONVERT,
    **more: object,
) -> Job:
    """Return a job with a unique id."""
    identifier = f"{program}-{secrets.token_hex(4)}"
    job = Job(
        id=identifier,
        program=program,
        inputs=dict(inputs or {}),
        outputs=dict(outputs),
        result_uri=f"s3://hanzo-ml/runs/{identifier}/{program}.json",
        store=server.settings.store,
        cache_dir="/cache",
    )
    return job.model_copy(update=more)


def submit(server: ServerProcess, job: Job) -> str:
    """Submit a program and return its token."""
    database = Database(server.settings.database_url)
    submit_program(database, job)
    token = ClusterCredentials(database).issue(job)[TOKEN_VARIABLE]
    database.close()
    return token


def objects_address(server: ServerProcess, job: Job) -> str:
    return f"{server.url}/v1/jobs/{job.id}/programs/{job.program}/objects"


def store_in_pod(server: ServerProcess, job: Job, token: str, attempt: int = 0) -> Store:
    """Return the store as the program sees it."""
    address = StoreAddress(root=f"api+{objects_address(server, job)}", buckets=server.settings.store.buckets)
    return Store(address, {TOKEN_VARIABLE: token, ATTEMPT_VARIABLE: str(attempt)})
