"""What the command line uploads: of a folder of many files, few are open at a time on either side."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from hanzo_ml.cli.connection import Refused
from hanzo_ml.cli.dataset_upload import list_local_files
from tests.server_process import REPOSITORY, ServerProcess

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


def test_a_file_whose_name_is_no_text_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    """It ended in a stack trace of the form that it was to be sent in."""
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_text('{"n": 1}\n')
    with pytest.raises(Refused, match="is not allowed: rename it, in UTF-8"):
        list_local_files(tmp_path, "jsonl")
