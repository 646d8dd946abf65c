"""Check and make a program's writes: to its own outputs, by its newest attempt."""

from recipes.storage.artifact_store import Store
from resources.jobs.program_tokens import ProgramGrant
from resources.metadata.database import Database
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
    if scope.is_own_log(uri, attempt):
        store.put_bytes(uri, data)
        return
    with hold_attempt(database, grant, attempt):
        store.put_bytes(uri, data)
