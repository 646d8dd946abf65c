"""`hanzo-ml run replay` of a run with a divergence and an out-of-memory, in real processes.

The test acts as the sensor: it passes each job to the compute as the checkpoint asset does.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.contracts.job import OUT_OF_MEMORY_FILE
from recipes.storage.base_model_folder import hash_model_folder
from resources.stack.detached_process import read_pid
from tests.recipes.tiny_model import make_tiny_model
from tests.support.assets.replayed_run import control_plane, dataset, server, work_off
from tests.support.server_process import REPOSITORY, ServerProcess

__all__ = ["control_plane", "dataset", "server"]

STEPS = 24


@pytest.mark.slow
@pytest.mark.long
def test_replay_of_a_run_with_divergence_and_out_of_memory_is_bit_identical(
    server: ServerProcess, control_plane: ControlPlane, dataset: str, tmp_path: Path
) -> None:
    """Memory runs out on the second pass through steps that were computed before the rollback."""
    model = make_tiny_model(tmp_path / "model")
    parameters: dict[str, Any] = {
        "base_model": {"uri": model.as_uri(), "sha256": hash_model_folder(model)},
        "base_dtype": "float32",
        "lora_dropout": 0.1,
        "learning_rate": 5e-3,
        "objective": "poisoned",
        "batch_size": 2,
        "gradient_accumulation": 1,
        "sequence_length": 64,
        "max_steps": STEPS,
        "eval_steps": None,
        "divergence": {"action": "skip"},
        "checkpoint": {"interval": "1h", "interval_steps": 4, "keep_last": 3},
    }
    body = {"name": "healed", "dataset": dataset, "parameters": parameters}
    submitted = httpx.post(f"{server.url}/v1/jobs", json=body, timeout=60)
    assert submitted.status_code == 201, submitted.text
    run, said = submitted.json()["id"], list[str]()
    killed: list[int] = []

    def run_out_of_memory_the_second_time(line: str, work: Path) -> None:
        said.append(line)
        again = any("continuing from checkpoint 8 without samples 22 to 25" in text for text in said)
        if again and not killed and f"step 13/{STEPS} loss" in line and (pid := read_pid(work)):
            killed.append(pid)
            (work / OUT_OF_MEMORY_FILE).touch()  # what `LocalCompute` leaves when the kernel's OOM count has grown
            os.kill(pid, signal.SIGKILL)

    work_off(run, control_plane, run_out_of_memory_the_second_time)
    command = [sys.executable, "-c", "from hanzo_ml.cli import main; main()", "run", "replay", run, "--json"]
    waiting = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        work_off(queued(server, waiting), control_plane, lambda line, work: None)
        out, problem = waiting.communicate(timeout=120)
    finally:
        waiting.kill()
    verdict = json.loads(out or problem)
    assert verdict["equal"] and verdict["unrepeated"] == [] and verdict["steps"] == STEPS, verdict
    healed = [incidents_of(server, one) for one in (run, verdict["replay"])]
    (diverged,), (short,) = healed[0]
    assert (diverged["rolled_back_to"], diverged["skipped"]) == (8, [22, 26])
    assert (short["batch_size"], short["gradient_accumulation"]) == (1, 2) and short["after"] >= 12
    assert healed[0] == healed[1]


def queued(server: ServerProcess, waiting: subprocess.Popen[str]) -> str:
    """Return the queued job."""
    while waiting.poll() is None:
        jobs = httpx.get(f"{server.url}/v1/jobs", params={"status": "queued"}, timeout=60).json()["jobs"]
        if jobs:
            return str(jobs[0]["id"])
        time.sleep(0.1)
    raise AssertionError(waiting.communicate())


def incidents_of(server: ServerProcess, run: str) -> list[list[dict[str, Any]]]:
    """Return what the events say about its divergences and memory."""
    events = httpx.get(f"{server.url}/v1/events", params={"limit": 1000}, timeout=60).json()["events"]
    return [
        [
            {**event["payload"], "job_id": "", "timestamp": 0}
            for event in events
            if (event["type"], event["key"]) == (type, run)
        ]
        for type in ("job.diverged", "job.out_of_memory")
    ]
