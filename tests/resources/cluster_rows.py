"""Database rows of a program submitted to a cluster."""

from typing import Any

from sqlalchemy import insert

from recipes.contracts.job import Job
from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.tables import cluster_jobs, job_attempts


def submit_program(database: Database, job: Job, generation: int = 1, wanted: str = "run") -> None:
    now = now_ms()
    row = {
        "job_id": job.id,
        "program": job.program.value,
        "namespace": "hanzo-ml",
        "name": f"{job.program}-{job.id}"[:63],
        "generation": generation,
        "document": job.model_dump(mode="json"),
        "wanted": wanted,
        "phase": "pending",
        "detail": "",
        "attempt": 0,
        "created_at": now,
        "updated_at": now,
    }
    with database.write() as connection:
        connection.execute(insert(cluster_jobs).values(row))


def claim_attempt(database: Database, job: Job, attempt: int) -> None:
    row: dict[str, Any] = {
        "job_id": job.id,
        "program": job.program.value,
        "attempt": attempt,
        "generation": 1,
        "claimed_by": f"uid-{attempt}",
        "nodes": {},
        "gpus": {},
        "started_at": now_ms(),
        "message": "",
        "counted": False,
    }
    with database.write() as connection:
        connection.execute(insert(job_attempts).values(row))
