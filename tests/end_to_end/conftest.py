"""One stack and one complete baseline for all tests of the chain.

Starting, training, evaluating and exporting take most of the time.
"""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipes.storage.base_model_folder import hash_model_folder
from tests.end_to_end.local_stack import LocalStack
from tests.recipes.tiny_model import make_tiny_model

STEPS = 32
RECORDS = 600


@dataclass(frozen=True)
class Baseline:
    """An uninterrupted run: every interrupted one must equal it."""

    job: str
    losses: list[tuple[int, float]]
    adapter_sha256: str
    parameters: dict[str, Any]


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    running = LocalStack(tmp_path_factory.mktemp("stack"))
    (running.home / "config.yaml").write_text("scheduler: {jobs_at_once: 2}\n")  # for the trials of a sweep
    running.hanzo_ml("up")
    try:
        yield running
    finally:
        workers = list((running.home / "run-workers").glob("*")) if (running.home / "run-workers").is_dir() else []
        print(f"{len(workers)} Dagster runs")
        running.hanzo_ml("down", check=False)


@pytest.fixture(scope="session")
def raw_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "colours.jsonl"
    colours = ("red", "green", "blue", "grey", "black")
    rows = [
        {"instruction": f"What colour has door number {number}?", "answer": f"Door {number} is {colours[number % 5]}."}
        for number in range(RECORDS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def parameters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a recipe for a tiny random model, whose steps take up to a second.

    Dropout is on, so that random states matter.
    """
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return {
        "base_model": {"uri": folder.as_uri(), "sha256": hash_model_folder(folder)},
        "base_dtype": "float32",
        "lora_rank": 8,
        "lora_dropout": 0.1,
        "learning_rate": 5e-3,
        "batch_size": 6,
        "gradient_accumulation": 5,
        "sequence_length": 256,
        "max_steps": STEPS,
        "eval_steps": STEPS // 2,
        # On a machine that runs the whole stack, two threads that wait for each other made a step four times
        # slower.
        "hardware": {"cpu": 1, "memory": "4Gi"},
        "checkpoint": {"interval": "1h", "interval_steps": 4, "keep_last": 3},
    }


@pytest.fixture(scope="session")
def dataset(stack: LocalStack, raw_data: Path) -> str:
    made = json.loads(stack.hanzo_ml("dataset", "create", "--name", "colours", "--path", str(raw_data), "--json").stdout)
    return f"{made['name']}@{made['version']}"


@pytest.fixture(scope="session")
def baseline(stack: LocalStack, dataset: str, parameters: dict[str, Any]) -> Baseline:
    """Train, evaluate and export by sensors alone."""
    job = stack.submit("doors", dataset, parameters)
    stack.wait_for("job.completed", job)
    stack.wait_for("model.exported", "doors")
    return Baseline(job, stack.losses(job), stack.adapter_sha256(job), parameters)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
