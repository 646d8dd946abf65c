"""`hanzo-ml run replay` of a run that went back after a divergence and ran out of memory then, with real processes.

The test plays the sensor: it hands each job to the compute as the checkpoint asset does.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.dry_run import training as dry_run
from hanzo_ml_assets.training import complete_training
from hanzo_ml_assets.training_plan import make_training_plan, training_job
from recipes.contracts.job import OUT_OF_MEMORY_FILE
from recipes.storage.base_model_folder import hash_model_folder
from resources.compute.base import Follower
from resources.ingest.version_creation import create_version
from resources.jobs.sandbox import SANDBOX
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.stack.detached_process import read_pid
from tests.recipes.preparation.preparation_workspace import questions
from tests.recipes.tiny_model import make_tiny_model
from tests.recipes.training.tracked_runs import install
from tests.server_process import REPOSITORY, ServerProcess

STEPS = 24
POISONED = """
import math
import time
from itertools import islice

import torch

from recipes.training.objectives.objective import Loss
from recipes.training.objectives.sft import Sft
from recipes.training.data.sample_order import SampleOrder

class Poisoned(Sft):
    "The loss of one row, the first of step 13, is not a number. Takes so long that there is time to be killed."

    bad = None

    def rows(self, split, *given):
        rows = super().rows(split, *given)
        if self.bad is None:  # the split to train on is the first
            ids = list(islice(SampleOrder(len(rows), self.recipe.seed).ids(), 13 * self.recipe.samples_per_step))
            self.bad = rows[ids[-self.recipe.samples_per_step]]["input_ids"]
        return rows

    def loss(self, model, batch):
        time.sleep(0.1)
        if model.training and any(torch.equal(row, self.bad) for row in batch["input_ids"]):
            return Loss(next(weight for weight in model.parameters() if weight.requires_grad).sum() * math.nan)
        return None
"""
"""An objective that is installed beside the product."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    install("poisoned", POISONED, tmp_path, monkeypatch)
    (tmp_path / "home").mkdir()
    process = ServerProcess(tmp_path / "home")
    for name, value in process.environment.items():
        if name.startswith("HANZO_ML_"):
            monkeypatch.setenv(name, value)
    with process:
        yield process


@pytest.fixture
def control_plane(server: ServerProcess) -> Iterator[ControlPlane]:
    opened = ControlPlane()
    yield opened
    opened.database.close()


@pytest.fixture
def dataset(control_plane: ControlPlane, tmp_path: Path) -> str:
    store, rows = control_plane.store, [json.dumps(row) + "\n" for row in questions(300, seed=1)]
    (tmp_path / "data.jsonl").write_text("".join(rows))
    version, _ = create_version(
        control_plane.database,
        store,
        name="doors",
        path=tmp_path / "data.jsonl",
        format="jsonl",
        user="u",
        organization=DEFAULT_ORGANIZATION,
    )
    splits = {}
    for part, share in (("train", rows[:-20]), ("validation", rows[-20:-10]), ("test", rows[-10:])):
        folder = tmp_path / part
        folder.mkdir()
        (folder / "records.jsonl").write_text("".join(share))
        splits[part] = {"artifact": store.publish(folder, f"{version.storage_path}{part}", part).model_dump()}
    with control_plane.database.write() as connection:
        control_plane.datasets.set_splits(connection, version, splits)
    return str(version.reference)


def work_off(run_id: str, control_plane: ControlPlane, on_line: Callable[[str, Path], None]) -> None:
    control_plane.jobs.start(run_id)
    plan = make_training_plan(dry_run.load_definition(SANDBOX), run_id, control_plane)
    job = training_job(plan, control_plane)
    follower = Follower(
        line=lambda line: on_line(line, control_plane.settings.home / "jobs" / job.id / "train"), phase=lambda seen: None
    )
    complete_training(plan, job, control_plane.compute.run(job, follower), control_plane)


@pytest.mark.slow
@pytest.mark.long
def test_what_is_left_of_a_run_that_healed_twice_is_the_same_to_the_last_bit(
    server: ServerProcess, control_plane: ControlPlane, dataset: str, tmp_path: Path
) -> None:
    """Memory runs out on the second way through steps that it had come to once before it went back."""
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
            (work / OUT_OF_MEMORY_FILE).touch()  # what `LocalCompute` leaves where the kernel's count has grown
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
    """The job that waits to be started."""
    while waiting.poll() is None:
        jobs = httpx.get(f"{server.url}/v1/jobs", params={"status": "queued"}, timeout=60).json()["jobs"]
        if jobs:
            return str(jobs[0]["id"])
        time.sleep(0.1)
    raise AssertionError(waiting.communicate())


def incidents_of(server: ServerProcess, run: str) -> list[list[dict[str, Any]]]:
    """What the events say of its divergences, and of memory."""
    told = httpx.get(f"{server.url}/v1/events", params={"limit": 1000}, timeout=60).json()["events"]
    return [
        [
            {**event["payload"], "job_id": "", "timestamp": 0}
            for event in told
            if (event["type"], event["key"]) == (type, run)
        ]
        for type in ("job.diverged", "job.out_of_memory")
    ]
