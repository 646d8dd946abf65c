"""Uploading a large folder keeps few files open at a time.

This holds for client and server.
"""

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from hanzo_ml.cli.connection import Refused
from hanzo_ml.cli.dataset_upload import list_local_files
from tests.support.server_process import REPOSITORY, ServerProcess

FILES = 1_500
OPEN = 64
"""Files that the command may have open: Python itself needs a few."""


def test_a_folder_of_more_files_than_a_process_may_open_is_uploaded(server: ServerProcess, tmp_path: Path) -> None:
    """The server refused more than 1,000, and the client opened all of them at once."""
    for number in range(FILES):
        folder = tmp_path / f"{number % 7}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.jsonl").write_text(json.dumps({"number": number}) + "\n")
    command = "from hanzo_ml.cli import main; main()"
    words = ["dataset", "create", "--name", "many", "--path", str(tmp_path), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", command, *words],
        cwd=REPOSITORY,
        env={**os.environ, "HANZO_ML_TRACKING_URI": server.url},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN, OPEN)),
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["num_records"] == FILES
    found = httpx.get(f"{server.url}/v1/datasets/{made['id']}/preview", params={"n": 1000}, trust_env=False)
    expected = [number for folder in range(7) for number in sorted(range(folder, FILES, 7), key=lambda n: f"{n}.jsonl")]
    assert [json.loads(line)["number"] for line in found.text.splitlines()] == expected[:1000]


def test_non_utf_8_file_name_is_refused_before_uploading(tmp_path: Path) -> None:
    """It ended in a stack trace of the upload form."""
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_text('{"n": 1}\n')
    with pytest.raises(Refused, match="is not UTF-8: rename it"):
        list_local_files(tmp_path, "jsonl")


def test_folder_of_splits_is_refused_with_the_command_for_one(tmp_path: Path) -> None:
    folder = tmp_path / "saved set"
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        (folder / split / "data.jsonl").write_text('{"n": 1}\n')
    with pytest.raises(Refused) as refused:
        list_local_files(folder, "jsonl", "mine")
    command = f"hanzo-ml dataset create --name mine --path '{folder}/train'"
    assert f"`{command}`" in str(refused.value)
    assert list_local_files(Path(shlex.split(command)[-1]), "jsonl")[0] == [folder / "train" / "data.jsonl"]


def test_skipped_files_and_unread_keys_are_listed(server: ServerProcess, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "refusal": "no"}]}
    (tmp_path / "a.ndjson").write_text(json.dumps(row) + "\n")
    (tmp_path / "._a.ndjson").write_text("")
    (tmp_path / "b.ndjson").write_text("")
    words = ["dataset", "create", "--name", "listed", "--path", str(tmp_path)]
    environment = {**os.environ, "HANZO_ML_TRACKING_URI": server.url}
    for _ in ("created", "exists already"):
        command = [sys.executable, "-c", "from hanzo_ml.cli import main; main()", *words]
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
        assert "skipped (hidden, empty or without records): ._a.ndjson, b.ndjson" in done.stdout
        assert "not rendered, because the serving engine drops it: messages.refusal (in 1)" in done.stdout
