"""Object store keys: the program has them, the user's command does not."""

from pathlib import Path

import pytest

from recipes.command.workspace import Folders, build_environment
from recipes.contracts.command_job import Script
from recipes.contracts.job import Job, Program, StoreAddress, Tracking

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_SESSION_TOKEN": "c"}


def environment(folder: Path, root: str, **own: str) -> dict[str, str]:
    job = Job(
        id="j",
        program=Program.COMMAND,
        parameters={"experiment": "e"},
        result_uri="s3://hanzo-ml/runs/j/command.json",
        store=StoreAddress(root=root, buckets={}),
        cache_dir="",
        tracking=Tracking(uri="http://127.0.0.1:1", run_id="j"),
    )
    folders = Folders(code=folder, checkpoints=folder, dataset=None, borrowed={})
    script = Script(command=("true",), env=own)
    return build_environment(job, script, folders, {"PATH": "/bin", **KEYS}, has_gpus=False)


def test_command_does_not_get_keys_of_the_job_store(tmp_path: Path) -> None:
    assert not KEYS.keys() & environment(tmp_path, "https://s3:9000").keys()


@pytest.mark.parametrize("root", ["file:///objects", "api+http://ml.hanzo.svc:8057/v1/jobs/j/programs/command/objects"])
def test_command_keeps_keys_of_another_store(tmp_path: Path, root: str) -> None:
    assert KEYS.items() <= environment(tmp_path, root).items()


def test_command_keeps_declared_keys(tmp_path: Path) -> None:
    assert environment(tmp_path, "https://s3:9000", AWS_ACCESS_KEY_ID="mine")["AWS_ACCESS_KEY_ID"] == "mine"
