"""What only GPUs can show: bit-exact over kills there too, memory that runs out on them, MFU, evaluation, and NCCL between
two.
"""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import evaluate
from recipes.gpus import GPUS
from recipes.incidents import OutOfMemory
from recipes.results import EvaluationReport
from resources.detached import read_pid
from tests.recipes.tiny_training import LORA as ADAPTER
from tests.recipes.tiny_training import TinyTraining
from tests.recipes.training.place import facts
from tests.recipes.training.runs import Runs, install, losses_of, step_of

pytestmark = pytest.mark.gpu

FULL = {"method": "full", "dtype": "float32", "learning_rate": 1e-3}
LORA = {"base_dtype": "bfloat16", "lora_dropout": 0.1}
QLORA = LORA | {"method": "qlora", "base_dtype": "nf4", "compute_dtype": "bfloat16", "double_quant": True}
HUNGRY = """
import torch
from recipes.training.objectives.sft import Sft

class Hungry(Sft):
    "A row in training costs three tenths of the GPU's memory: two fit, four do not."

    def loss(self, model, batch):
        if model.training:
            row = 3 * torch.cuda.get_device_properties(0).total_memory // 10
            torch.empty(len(batch["input_ids"]) * row, dtype=torch.uint8, device=batch["input_ids"].device)
        return None
"""


def on_gpus(count: int, strategy: str = "ddp") -> dict[str, Any]:
    """What a recipe says that trains on so many of this machine's. Fails where it has fewer."""
    found = torch.cuda.device_count()
    if found < count:
        pytest.fail(f"needs {count} GPU{'s' * (count > 1)}, and this machine has {found}: run `make test-gpu` on another")
    name = torch.cuda.get_device_name(0).upper()
    gpu_type = next((known for known in GPUS if known.split("-")[1].upper() in name), None)
    return {
        "hardware": {"cpu": 1, "gpus": count, "gpu_type": gpu_type},
        "distributed": {"strategy": strategy, "gpus_per_node": count, "backend": "nccl"},
    }


@pytest.mark.parametrize(
    ("name", "method"), [("lora", LORA), ("qlora", QLORA | {"optimizer": "paged_adamw"}), ("full", FULL)]
)
def test_a_run_that_is_killed_ends_as_if_nobody_had(runs: Runs, name: str, method: dict[str, Any]) -> None:
    """With dropout, whose random numbers are the GPU's."""
    settings = {"max_steps": 20, **method, **on_gpus(1)}
    whole = runs.train(runs.job(f"gpu-{name}-whole", **settings))
    losses = list(losses_of(whole).values())
    assert sum(losses[-4:]) < sum(losses[:4])
    due = [random.randrange(first, first + 6) for first in (1, 10)]
    job = runs.job(f"gpu-{name}-killed", **settings)
    killed: dict[int, int] = {}

    def kill(line: str) -> None:
        pid = read_pid(Path(job.work_dir))
        if due and pid and pid not in killed and step_of(line) >= due[0]:
            os.kill(pid, signal.SIGKILL)
            killed[pid] = due.pop(0)

    result = runs.train(job, kill)
    assert len(killed) == 2, killed
    assert losses_of(result) == losses_of(whole), killed
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }, killed


def test_a_step_that_does_not_fit_on_the_gpu_is_done_in_smaller_parts(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("hungry", HUNGRY, tmp_path, monkeypatch)
    enough = runs.train(runs.job("gpu-enough", **on_gpus(1)))
    short = runs.train(runs.job("gpu-short", objective="hungry", **on_gpus(1)))
    assert facts(short).incidents == (OutOfMemory(step=1, batch_size=2, gradient_accumulation=2, after=0),)
    assert losses_of(short) == pytest.approx(losses_of(enough), rel=1e-3)


def test_an_evaluation_computes_on_the_gpu_what_it_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(1)
    tiny = TinyTraining(tmp_path)
    trained = tiny.untrained(**ADAPTER)

    def losses(name: str) -> list[float | None]:
        report = EvaluationReport.model_validate(tiny.evaluate(name, trained, **ADAPTER).facts["report"])
        return [report.scores[model].loss for model in ("base", "tuned")]

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = losses("gpu")
    weights = sum(file.stat().st_size for file in tiny.model.glob("*.safetensors"))
    assert torch.cuda.max_memory_allocated() - before > weights
    monkeypatch.setattr(evaluate, "computing_device", lambda: torch.device("cpu"))
    assert found == pytest.approx(losses("without"), rel=1e-4)


def test_the_share_of_the_gpu_s_peak_is_logged_for_each_step(runs: Runs) -> None:
    settings = on_gpus(1)
    assert settings["hardware"]["gpu_type"], f"recipes.gpus does not know {torch.cuda.get_device_name(0)}: add it"
    runs.train(runs.job("gpu-mfu", max_steps=4, base_dtype="bfloat16", **settings))
    shares = dict(runs.losses("gpu-mfu", "train/mfu"))
    assert set(shares) == {1, 2, 3, 4}
    assert all(0 < share < 1 for share in shares.values())


@pytest.mark.parametrize(("strategy", "method"), [("ddp", {}), ("fsdp", FULL), ("pipeline", FULL)])
def test_two_gpus_compute_what_one_does_on_the_same_rows(runs: Runs, strategy: str, method: dict[str, Any]) -> None:
    """Their gradients travel over NCCL, and between stages what one computes for the next."""
    both = on_gpus(2, strategy) | ({"gradient_accumulation": 2} if strategy == "pipeline" else {})
    one = runs.train(runs.job(f"gpu-{strategy}-one", batch_size=4, **method, **on_gpus(1, strategy)))
    two = runs.train(runs.job(f"gpu-{strategy}-two", batch_size=2, **method, **both))
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-4)


def test_one_process_sees_one_of_two_gpus(runs: Runs) -> None:
    """transformers takes all that it finds, with as many times the rows in each step."""
    on_gpus(2)
    told = on_gpus(1)
    alone = runs.train(runs.job("gpu-told", **told))
    untold = runs.train(runs.job("gpu-untold", hardware=told["hardware"]))
    assert losses_of(untold) == losses_of(alone)
