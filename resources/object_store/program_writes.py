"""Check and make a program's writes: to its own outputs, by its newest attempt."""

import re

from recipes.contracts.job import Job, Program
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from resources.compute.base import JobRef
from resources.jobs.program_tokens import ProgramGrant
from resources.metadata.database import Database
from resources.metadata.job_attempts import JobAttempts
from resources.object_store.attempt_fence import check_attempt, hold_attempt
from resources.object_store.program_scope import ProgramScope


def check_write(scope: ProgramScope, store: Store, database: Database, grant: ProgramGrant, uri: str, attempt: int) -> None:
    """Raises HanzoError: 403 for what is no output, 409 for an older attempt and for what is never written again."""
    scope.check_write(uri, attempt)
    scope.check_create(uri, store)
    if not scope.is_own_log(uri, attempt):
        check_attempt(database, grant, attempt)


def commit(
    scope: ProgramScope, store: Store, database: Database, grant: ProgramGrant, uri: str, data: bytes, attempt: int
) -> None:
    """Store an object that goes through this server. The manifest of a new checkpoint is recorded as progress."""
    if scope.is_own_log(uri, attempt):
        store.put_bytes(uri, data)
        return
    with hold_attempt(database, grant, attempt):
        # Metadata is added to manifests that are there already.
        is_new_checkpoint = is_checkpoint_manifest(grant.job, uri) and not store.exists(uri)
        store.put_bytes(uri, data)
    if is_new_checkpoint:
        JobAttempts(database).record_checkpoint(JobRef(grant.job_id, grant.program), attempt)


def is_checkpoint_manifest(job: Job, uri: str) -> bool:
    """Whether an object makes a checkpoint of a training complete."""
    if job.program is not Program.TRAIN or job.tracking is None:
        return False
    folder = re.escape(uris.run_checkpoints(job.tracking.run_id))
    return re.fullmatch(rf"{folder}/\d+/{re.escape(MANIFEST_FILE)}", uri) is not None
