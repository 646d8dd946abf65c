"""Server records of a program's committed objects."""

from pathlib import Path

import pytest

from recipes.contracts.job import Job, Program, StoreAddress, Tracking
from recipes.storage.artifact_store import Store
from resources.jobs.program_tokens import ProgramGrant
from resources.metadata.database import Database
from resources.metadata.job_attempts import JobAttempts
from resources.object_store.program_writes import ProgramWrites
from tests.resources.cluster_rows import claim_attempt, submit_program
from tests.resources.metadata.conftest import database, database_url
from tests.support.postgres_server import migrated_sqlite, postgres, postgres_url, sqlite_url

__all__ = ["database", "database_url", "migrated_sqlite", "postgres", "postgres_url", "sqlite_url"]

CHECKPOINTS = "s3://hanzo-ml/checkpoints/r"


def training(root: Path) -> Job:
    return Job(
        id="r",
        program=Program.TRAIN,
        outputs={"checkpoints": CHECKPOINTS},
        result_uri="s3://hanzo-ml/runs/r/train.json",
        store=StoreAddress(root=root.as_uri(), buckets={"checkpoints": "c"}),
        cache_dir="/cache",
        tracking=Tracking(uri="http://api", run_id="r"),
    )


@pytest.mark.parametrize(
    ("name", "is_progress"),
    [
        ("700/manifest.json", True),
        ("700/parts/1-of-2.json", False),
        ("700/parts/manifest.json", False),
        ("recovery/manifest.json", False),
    ],
)
def test_manifest_of_a_checkpoint_is_progress_of_its_attempt(
    database: Database, tmp_path: Path, name: str, is_progress: bool
) -> None:
    job = training(tmp_path)
    submit_program(database, job)
    claim_attempt(database, job, 1)
    write(database, job, f"{CHECKPOINTS}/{name}", 1)
    assert (saved_at(database, job, 1) is not None) is is_progress


def test_metadata_added_to_a_checkpoint_is_not_progress(database: Database, tmp_path: Path) -> None:
    job = training(tmp_path)
    submit_program(database, job)
    for attempt in (1, 2):
        claim_attempt(database, job, attempt)
        write(database, job, f"{CHECKPOINTS}/700/manifest.json", attempt)
    assert saved_at(database, job, 1) is not None and saved_at(database, job, 2) is None


def write(database: Database, job: Job, uri: str, attempt: int) -> None:
    grant = ProgramGrant(job.id, job.program, "default", "", job, 1, "run")
    ProgramWrites(Store(job.store), database, grant, attempt).commit(uri, b"{}")


def saved_at(database: Database, job: Job, attempt: int) -> int | None:
    return JobAttempts(database).list(job)[attempt - 1].saved_at
