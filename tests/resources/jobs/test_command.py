"""Stored state of a command that is submitted more than once."""

from pathlib import Path

from recipes.contracts.command_job import CommandJob
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.jobs.command import CODE, submit_command
from resources.lineage.edges import find_artifact
from resources.metadata.database import Database
from resources.metadata.jobs import JobRecord
from tests.recipes.preparation.preparation_workspace import BUCKETS


def test_job_keeps_its_files_when_a_call_with_the_same_key_sends_others(tmp_path: Path) -> None:
    """Regression: of two concurrent calls, the later one's files replaced those of the job."""
    database, store = (
        Database(f"sqlite:///{tmp_path}/metadata.db"),
        Store(StoreAddress(root=tmp_path.as_uri(), buckets=BUCKETS)),
    )
    database.migrate()

    def submit(*lines: str) -> JobRecord:
        files = {f"{number}.py": line for number, line in enumerate(lines)}
        asked = CommandJob.model_validate({"name": "once", "command": ["python", "0.py"], "files": files})
        return submit_command(database, store, asked, "ann", "default", "one")

    first = submit("print(1)")
    stored = store.list("s3://hanzo-ml/runs/one")
    code = Artifact.model_validate(first.config[CODE])
    assert submit("print(2)", "print(3)") == submit("print(1)") == submit() == first
    assert store.list("s3://hanzo-ml/runs/one") == stored
    (file,) = store.manifest(code).files
    assert b"".join(store.pieces(code.uri, file)) == b"print(1)"
    with database.read() as connection:
        assert find_artifact(connection, code.digest) == code
    database.close()
