"""Runs survive `kill -9` at random steps and a corrupt checkpoint, bit for bit."""

import random
import shutil
from pathlib import Path

import pytest

from resources.settings.settings import Settings
from resources.stack.services import list_services
from tests.end_to_end.conftest import Baseline, kill
from tests.end_to_end.local_stack import LocalStack, wait_until

LAST = 20
"""Step of the last round: two checkpoints exist by then, and the round must end before the training."""
APART = 9
"""Steps between the rounds."""


def assert_equals(stack: LocalStack, job: str, baseline: Baseline) -> None:
    """Assert that losses are complete and equal, without duplicates, and final weights equal."""
    stack.wait_for("job.completed", job)
    assert stack.losses(job) == baseline.losses
    assert stack.adapter_sha256(job) == baseline.adapter_sha256


@pytest.mark.requirement("I11")
@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.long)])
def test_training_survives_repeated_kills_and_a_corrupt_checkpoint_bit_for_bit(
    stack: LocalStack, baseline: Baseline, dataset: str, rounds: int
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # to reproduce a failure
    chance = random.Random(seed)
    job = stack.submit(f"doors-killed-{rounds}", dataset, baseline.parameters)
    killed: set[Path] = set()
    for first in range(LAST - (rounds - 1) * APART, LAST + 1, APART):
        stack.wait_for_step(job, first + chance.randrange(4))
        # Sometimes the trainer continues alone for a while, sometimes it dies with the worker that could have
        # restarted it.
        worker_dies_with_trainer = chance.random() < 0.5
        if not worker_dies_with_trainer:
            kill_run_worker(stack, killed)
        for service in chance.sample(("dagster-daemon", "api"), 2):
            kill(stack.pid(stack.service(service)))
        with stack.standing_still(job):
            stack.hanzo_ml("up")
        stack.wait_for_step(job, first + 4 + chance.randrange(2))
        kill(stack.pid(stack.trainer(job)))
        if first == LAST:
            corrupt_newest_checkpoint(stack, job)
        if worker_dies_with_trainer:
            kill_run_worker(stack, killed)
    assert_equals(stack, job, baseline)
    assert len(killed) == rounds
    log = (stack.trainer(job) / "log.txt").read_text()
    assert log.count("resuming from checkpoint") == rounds
    assert "falling back" in log


def kill_run_worker(stack: LocalStack, killed: set[Path]) -> None:
    """Kill the run worker that follows the job now.

    The trainer continues alone, and a retry has to find it or its result.
    """

    def next_worker() -> Path | None:
        return next((worker for worker in stack.run_workers() if worker not in killed), None)

    worker = wait_until("a run worker", next_worker)
    killed.add(worker)
    kill(stack.pid(worker))


def corrupt_newest_checkpoint(stack: LocalStack, job: str) -> None:
    """Truncate its weights locally and, if uploaded, in the store."""
    checkpoints = stack.trainer(job) / "checkpoints"
    for pending in checkpoints.glob(".*.tmp"):  # killed before its rename: the next start would finish that commit
        shutil.rmtree(pending)
    newest = max((path for path in checkpoints.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    for folder in (newest, stack.path(f"s3://hanzo-ml/checkpoints/{job}/{newest.name}")):
        weights = folder / "adapter_model.safetensors"
        if weights.is_file():
            weights.write_bytes(weights.read_bytes()[:-64])


@pytest.mark.slow
@pytest.mark.long
def test_up_restores_the_stack_after_the_death_of_any_process(stack: LocalStack) -> None:
    """Dagster's code server proxy kept running silently without the server that it had started."""
    processes = stack.processes()
    assert len(processes) >= len(list_services(Settings.load(stack.environment)))
    for process in processes:
        if process.is_running():
            process.kill()
            process.wait()
            stack.hanzo_ml("up")
