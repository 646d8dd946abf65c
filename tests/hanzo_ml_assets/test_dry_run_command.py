"""`hanzo-ml job submit --dry-run` with a command: the specification's gang of four pods.

It writes nothing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.resources.compute.kubernetes.schemas import check
from tests.support.api.command_job import SPECIFICATION

ROOT = Path(__file__).resolve().parents[2]
EXACT = Path(__file__).with_name("specification_job.yaml")


def dry_run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.yaml").write_text(text)
    code = "from hanzo_ml.cli import main; main()"
    arguments = ["job", "submit", "--config", str(folder / "job.yaml"), "--dry-run"]
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path / "none"))
    return tmp_path


def test_specified_job_file_renders_one_gang_of_four_pods(folder: Path) -> None:
    (folder / "train.py").write_text("x" * (1 << 20))  # longer than a process argument may be
    done = dry_run(folder, SPECIFICATION)
    assert (done.returncode, done.stderr) == (0, "")
    assert "# $ torchrun --nproc_per_node=8 train.py" in done.stdout
    assert "# A pod cannot reach dataset finance-corpus-v3@7, which is not there" in done.stdout
    document, _, job_set = yaml.safe_load_all(done.stdout)
    job: dict[str, Any] = json.loads(document["data"]["job.json"])
    assert (job["schedule"]["max_duration"], job["checkpoint"]["interval"]) == ("48h", "1h")
    assert job["inputs"]["code"]["size_bytes"] == 1 << 20
    (gang,) = job_set["spec"]["replicatedJobs"]
    assert gang["template"]["spec"]["completions"] == 4
    (container,) = gang["template"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "hanzoai/ml-pytorch:2.3-cuda12.4"
    assert container["resources"]["limits"] == {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}
    assert not (folder / "none").exists()


def test_specification_s_job_file_renders_exactly_these_objects(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To review an intended change: `REWRITE=1 pytest -k exactly`, then `git diff`."""
    (folder / "train.py").write_text("print()\n")
    monkeypatch.setenv("HANZO_ML_SCHEDULER_TRACKING_URI", "http://ml.hanzo.svc:8057")
    done = dry_run(folder, SPECIFICATION)
    assert done.returncode == 0, done.stderr
    objects = done.stdout.partition("---\n")[2]
    if os.environ.get("REWRITE"):
        EXACT.write_text(objects)
    assert objects == EXACT.read_text()
    for item in yaml.safe_load_all(objects):
        check(item)


def test_unknown_key_is_refused_in_one_line(folder: Path) -> None:
    done = dry_run(folder, "name: x\ncommand: [python]\nresorces: {gpus: 1}\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: job: unknown key 'resorces': did you mean 'resources'?\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("schedule: {max_duration: 0s}", "schedule.max_duration"),
        ("env: {KEY: '********'}", "env.KEY is the mask"),
        ("distributed: {num_nodes: 3, gpus_per_node: 8}", "asks for 24 GPUs, and the quota of your organization is 8"),
    ],
)
def test_job_that_a_server_would_refuse_is_refused_offline(
    folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    (folder / "config.yaml").write_text("scheduler: {quotas: {default: {max_gpus: 8}}}")
    monkeypatch.setenv("HANZO_ML_CONFIG", str(folder / "config.yaml"))
    done = dry_run(folder, f"name: x\ncommand: [python]\n{line}\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr


def test_dry_run_output_says_that_no_server_answered(folder: Path) -> None:
    done = dry_run(folder, "name: x\ncommand: [python]\n")
    assert "\n# No server answers at http://127.0.0.1:" in done.stdout and "permissions and quotas" in done.stdout
