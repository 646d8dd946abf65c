"""The package of a training script (row T3), in an environment that has nothing else."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import httpx
import pytest

from tests.api.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
SCRIPT = """
import importlib.metadata, importlib.util, sys
import hanzo_ml

assert importlib.metadata.version("hanzo-ml-client") == "1.0.0"
assert not any(importlib.util.find_spec(name) for name in ("torch", "dagster", "sqlalchemy", "resources"))
hanzo_ml.set_tracking_uri(sys.argv[1])
hanzo_ml.set_experiment("zen-72b-finance")
with hanzo_ml.start_run(run_name="qlora") as run:
    run.log_params({"lora_rank": 64})
    run.log_metrics({"train/loss": 0.42}, step=100)
    run.log_artifact("notes.txt", sys.argv[2])
print(run.id)
"""


@pytest.mark.slow
def test_it_is_small_and_logs(tmp_path: Path) -> None:
    for part in ("hanzo_ml", "deploy/client"):  # a build leaves its traces where the sources are
        shutil.copytree(ROOT / part, tmp_path / "source" / part)
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv/bin/python")
    quick = ["--quiet", "--disable-pip-version-check", "--no-compile"]
    install = ["-m", "pip", "--python", python, "install", *quick, str(tmp_path / "source/deploy/client")]
    subprocess.run([sys.executable, *install], check=True, stdout=sys.stderr)
    notes = tmp_path / "notes.txt"
    notes.write_text("as expected")
    with ServerProcess(tmp_path / "server") as server:
        script = [python, "-I", "-c", SCRIPT, server.url, str(notes)]
        run_id = subprocess.run(script, check=True, stdout=subprocess.PIPE, text=True, cwd=tmp_path).stdout.split()[-1]
        run = httpx.get(f"{server.url}/v1/runs/{run_id}").json()
        experiment = httpx.get(f"{server.url}/v1/experiments/{run['experiment_id']}").json()
    assert experiment["name"] == "zen-72b-finance"
    assert (run["status"], run["params"]) == ("completed", {"lora_rank": "64"})
    assert [artifact["key"] for artifact in run["artifacts"]] == ["notes.txt"]
