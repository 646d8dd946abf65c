"""Check and perform a program's writes.

Only to its own outputs, and only by its newest attempt.
"""

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass

from recipes.contracts.job import Job, Program
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from resources.compute.base import JobRef
from resources.jobs.program_tokens import ProgramGrant
from resources.metadata.database import Database
from resources.metadata.job_attempts import JobAttempts
from resources.object_store.attempt_fence import check_attempt, hold_attempt
from resources.object_store.program_scope import ProgramScope, normalize_uri, program_scope


@dataclass(frozen=True)
class ProgramWrites:
    """The writes of one attempt of a program."""

    store: Store
    database: Database
    grant: ProgramGrant
    attempt: int

    @property
    def scope(self) -> ProgramScope:
        return program_scope(self.grant.job)

    def check(self, uri: str) -> str:
        """Check a write, and return the URI in its canonical form.

        Raises:
            HanzoError: 403 if it is no output, 409 for an older attempt or for an object that cannot be overwritten.
        """
        uri, scope = normalize_uri(self.store, uri), self.scope
        scope.check_write(uri, self.attempt)
        scope.check_create(uri, self.store)
        if not scope.is_own_log(uri, self.attempt):
            check_attempt(self.database, self.grant, self.attempt)
        return uri

    def hold(self) -> AbstractContextManager[None]:
        """Prevent a newer attempt from being claimed. Raises HanzoError: 409 for an older attempt."""
        return hold_attempt(self.database, self.grant, self.attempt)

    def commit(self, uri: str, data: bytes) -> None:
        """Store an object that is written through this server.

        The manifest of a new checkpoint is recorded as progress.
        """
        if self.scope.is_own_log(uri, self.attempt):
            self.store.put_bytes(uri, data)
            return
        with self.hold():
            # Metadata is added to existing manifests, which are no new checkpoints.
            is_new_checkpoint = is_checkpoint_manifest(self.grant.job, uri) and not self.store.exists(uri)
            self.store.put_bytes(uri, data)
        if is_new_checkpoint:
            JobAttempts(self.database).record_checkpoint(JobRef(self.grant.job_id, self.grant.program), self.attempt)


def is_checkpoint_manifest(job: Job, uri: str) -> bool:
    """Return whether writing this object completes a training checkpoint."""
    if job.program is not Program.TRAIN or job.tracking is None:
        return False
    folder = re.escape(uris.run_checkpoints(job.tracking.run_id))
    return re.fullmatch(rf"{folder}/\d+/{re.escape(MANIFEST_FILE)}", uri) is not None
