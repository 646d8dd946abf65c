"""Jobs of `recipes.command`, and what they log."""

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.command.snapshot_store import SnapshotStore
from recipes.contracts.command_job import CommandJob
from recipes.contracts.job import Job, StoreAddress
from recipes.job_processes import find_job_processes
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.compute.base import Follower
from resources.compute.local.backend import LocalCompute
from resources.compute.local.work_folder import work_folder
from resources.jobs.command import code_manifest, plan_command
from resources.metadata.jobs import COMMAND, JobRecord

ROOT = Path(__file__).resolve().parents[3]

BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}

ID = uuid.uuid4().hex

"""Job id of every test in this process; other test processes have another.

So neither ends the other's processes.
"""


class CommandJobs:
    """Folders and store of a test's jobs, and their log lines."""

    def __init__(self, folder: Path, store: Store | None = None) -> None:
        self.folder, self.jobs = folder, folder / "jobs"
        self.source = ROOT
        self.store = store or Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=BUCKETS))
        self.address = self.store.address
        self.lines: list[str] = []
        self.follower = Follower(self.lines.append, lambda seen: None)

    def job(self, script: str, **keys: Any) -> Job:
        """Return a job whose command is `python main.py` with this script."""
        document = {"name": "mine", "command": ["python", "main.py"], "files": {"main.py": script}, **keys}
        asked = CommandJob.model_validate(document)
        place = f"s3://hanzo-ml/runs/{ID}/code"
        for path, text in asked.files.items():
            self.store.put_bytes(f"{place}/{path}", text.encode())
        code = self.store.put_manifest(place, code_manifest(asked))
        config = asked.model_dump(mode="json", exclude={"files"}) | {"code": code.model_dump()}
        record = JobRecord(ID, "mine", COMMAND, "running", config, "u", "default", 0, 0, None, "", {}, None)
        work = plan_command(
            record,
            None,
            store=self.address,
            tracking_uri="http://127.0.0.1:9",
            cache_dir=str(self.folder / "cache"),
        )
        return work.model_copy(update={"work_dir": str(work_folder(self.jobs, work))})

    def state(self) -> Artifact | None:
        """Return the newest published snapshot."""
        return SnapshotStore(self.store, f"s3://hanzo-ml/checkpoints/{ID}", 3).newest()

    def said(self) -> list[str]:
        """Return the lines printed by the command itself."""
        return [line for line in self.lines if line[2:3] != ":"]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[CommandJobs]:
    yield CommandJobs(tmp_path)
    assert find_job_processes(ID) == []


@pytest.fixture
def compute(commands: CommandJobs) -> LocalCompute:
    return LocalCompute(commands.jobs, source=ROOT, max_restarts=2, grace_seconds=20, poll_seconds=0.02)


def until(what: str, look: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.01)
    return found
