"""Resources of this machine that a job may use."""

import os
from pathlib import Path

import pytest
import torch

from recipes import train as program
from recipes.contracts.job import Hardware
from recipes.machine import usable_cores
from tests.recipes.tiny_training import LORA, TinyTraining, made


def test_job_uses_the_cores_it_requests() -> None:
    assert usable_cores(1) == 1
    assert usable_cores(None) == usable_cores(0) == os.cpu_count()


def test_job_threads_are_limited_to_the_cores_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyTraining(tmp_path)
    monkeypatch.setattr(program, "METRICS_GRACE_SECONDS", 0)
    there = os.cpu_count() or 1
    job = tiny.training_job("greedy", tiny.recipe(**LORA, max_steps=1))
    asks = job.model_copy(update={"hardware": Hardware(cpu=there + 3)})
    program.train(asks, tiny.store, made(asks))
    assert torch.get_num_threads() == there
