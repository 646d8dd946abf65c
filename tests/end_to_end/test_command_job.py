"""A user's script on a running stack: submitted, started by the sensor, followed, ended."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from recipes.job_processes import find_job_processes
from tests.end_to_end.local_stack import LocalStack, wait_until
from tests.recipes.ddp_script import EPOCHS, SCRIPT, SPECIFICATION

pytestmark = pytest.mark.slow


def submit(stack: LocalStack, folder: Path, script: str, **keys: Any) -> str:
    """Submit a job whose file and script are in the same folder; return its id."""
    (folder / "train.py").write_text(script)
    config = folder / "job.yaml"
    config.write_text(json.dumps({"name": "mine", "command": ["python", "train.py"], **keys}))
    return str(json.loads(stack.hanzo_ml("job", "submit", "--config", str(config), "--json").stdout)["id"])


def log_of(stack: LocalStack, job: str) -> str:
    return stack.hanzo_ml("job", "logs", job).stdout


def wait_for_line(stack: LocalStack, job: str, line: str, times: int = 1) -> None:
    """Wait for a line of the log file, without starting a process per poll."""
    file = stack.home / "jobs" / job / "command" / "log.txt"
    wait_until(f"{line} of {job}", lambda: file.is_file() and file.read_text().count(line) >= times)


@pytest.mark.requirement("H6", "S1")
def test_specified_multi_gpu_script_trains_unchanged(stack: LocalStack, tmp_path: Path) -> None:
    assert SPECIFICATION in SCRIPT
    experiment = {"HANZO_ML_EXPERIMENT": "ddp", "HANZO_ML_TRACKING_URI": "http://ml.hanzo.svc:8057"}
    job = submit(stack, tmp_path, SCRIPT, command=["torchrun", "--nproc_per_node=2", "train.py"], env=experiment)
    assert wait_until("its end", lambda: stack.events("job.completed", "job.failed", key=job))[0]["type"] == "job.completed"
    run = stack.get(f"/v1/runs/{job}")
    assert (run["status"], stack.get(f"/v1/experiments/{run['experiment_id']}")["name"]) == ("completed", "ddp")
    params = {"run_id": job, "metric_key": "loss", "max_results": 25000}
    points = stack.get("/api/2.0/mlflow/metrics/get-history", **params)["metrics"]
    losses = [point["value"] for point in sorted(points, key=lambda point: point["step"])]
    assert len(losses) == EPOCHS and losses[-1] < losses[0] / 1000
    left = stack.path(stack.get(f"/v1/jobs/{job}")["artifacts"]["checkpoints"]["uri"])
    assert (left / "rank-0.txt").read_text() == (left / "rank-1.txt").read_text()
    assert (left / "model.safetensors").is_file()
    log = log_of(stack, job)
    assert "$ torchrun --nproc_per_node=2 train.py" in log and "no GPU on this machine" in log


WAITS = """
import os, subprocess, sys, time
starts = os.path.join(os.environ["HANZO_ML_CHECKPOINTS"], "starts")
open(starts, "a").write("x")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("begun", flush=True)
while not os.path.exists("go"): time.sleep(0.05)
"""


@pytest.mark.requirement("S2", "S4")
def test_killed_command_is_restarted_and_a_cancelled_one_leaves_no_process(stack: LocalStack, tmp_path: Path) -> None:
    job = submit(stack, tmp_path, WAITS)
    wait_for_line(stack, job, "begun")
    before = find_job_processes(job)
    assert len(before) == 2
    for process in before:
        os.kill(process, signal.SIGKILL)
    wait_for_line(stack, job, "begun", times=2)
    assert job in stack.hanzo_ml("job", "list", "--status", "running", "--json").stdout
    assert len(find_job_processes(job)) == 2
    stack.hanzo_ml("job", "cancel", job)
    wait_until("its end", lambda: not find_job_processes(job))
    assert stack.get(f"/v1/runs/{job}")["status"] == "cancelled"


def test_command_survives_the_kill_of_its_run_worker(stack: LocalStack, tmp_path: Path) -> None:
    job = submit(stack, tmp_path, WAITS)
    wait_for_line(stack, job, "begun")
    os.kill(stack.pid(stack.run_worker(job)), signal.SIGKILL)
    (stack.home / "jobs" / job / "command" / "code" / "go").touch()
    stack.wait_for("job.completed", job)
    assert log_of(stack, job).count("begun") == 1
    assert find_job_processes(job) == []
