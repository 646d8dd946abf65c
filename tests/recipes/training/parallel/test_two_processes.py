"""Training in two processes matches training in one.

It is bit-exact over kills; with another number of processes in between, no row is lost or repeated.

Runs that are killed or stopped are started by LocalCompute; their references, and runs that change their number of
processes, are forked.
"""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from recipes.contracts.job import Distributed
from recipes.contracts.results import TrainingFacts
from resources.stack.detached_process import read_pid
from tests.recipes.training.forked_processes import Forks, log_of
from tests.recipes.training.parallel_strategies import CUT, rows_at_once, shape
from tests.recipes.training.tracked_runs import Runs, children, install, losses_of, step_of, steps_broken_off, wait_for_line
from tests.support.recipes.two_process_training import FULL, RECORDING

pytestmark = pytest.mark.slow

MIXED = FULL | {"dtype": "bfloat16"}
STRATEGIES: list[tuple[str, dict[str, Any], float]] = [
    ("ddp", {}, 1e-4),
    ("fsdp", FULL, 1e-4),
    ("fsdp", MIXED, 1e-2),  # rounding differs where the CPU computes in bfloat16
    ("deepspeed_zero2", FULL, 1e-4),
    ("deepspeed_zero3", {}, 1e-4),
    ("fsdp", FULL | {"objective": "dpo"}, 1e-4),
    ("tensor", FULL, 1e-4),
    ("hybrid", FULL, 1e-4),
]
"""Strategy, settings, and relative tolerance of the losses against one process."""
MORE_STRATEGIES: list[tuple[str, dict[str, Any], float]] = [
    ("fsdp", {}, 1e-4),
    ("fsdp", {"base_dtype": "bfloat16"}, 1e-2),
    ("deepspeed_zero2", MIXED, 1e-2),
    ("deepspeed_zero3", FULL, 1e-4),
    ("tensor", MIXED, 1e-2),
    ("tensor", FULL | {"objective": "dpo"}, 1e-4),
    ("tensor", FULL | {"objective": "orpo"}, 1e-4),
    ("hybrid", MIXED, 1e-2),
    ("deepspeed_zero2", FULL | {"objective": "dpo"}, 1e-4),
    ("deepspeed_zero3", FULL | {"objective": "dpo"}, 1e-4),
    ("deepspeed_zero3", {"objective": "dpo"}, 1e-4),
    ("deepspeed_zero2", {"objective": "orpo"}, 1e-4),
    ("deepspeed_zero3", FULL | {"objective": "orpo"}, 1e-4),
]
"""Further methods and objectives of the strategies above."""
SLOW = """
import time
from recipes.runner import log_line
from recipes.training.objectives.sft import Sft

class Slow(Sft):
    "Takes so long to evaluate that there is time to be killed."

    def loss(self, model, batch):
        if not model.training:
            log_line("evaluating")
            time.sleep(0.5)
        return None
"""
STOPPED = """
import os
import signal
from pathlib import Path

import torch.distributed as dist

from recipes.training.objectives.sft import Sft

class Stopped(Sft):
    "Each process writes down its micro-batches; the last is asked to stop in its sixth, if nobody was asked before."

    begun = 0

    def loss(self, model, batch):
        folder, rank = Path(self.recipe.description), dist.get_rank()
        if model.training:
            self.begun += 1
            with (folder / str(rank)).open("a") as file:
                file.write(f"{os.getpid()} ")
            if self.begun == 6 and rank == dist.get_world_size() - 1 and not (folder / "asked").exists():
                (folder / "asked").touch()
                os.kill(os.getpid(), signal.SIGTERM)
        return None
"""
WEIGHING = """
from pathlib import Path

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from recipes.training.objectives.sft import Sft

def own(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

class Weighing(Sft):
    "Each process writes down the bytes of the whole model, and what it holds of weights, and of gradients in between."

    begun = 0

    def loss(self, model, batch):
        place = Path(self.recipe.description, str(dist.get_rank()))
        self.begun += model.training
        weights = list(model.parameters())
        if model.training and self.begun == 1:
            storages = [own(weight).untyped_storage() for weight in weights]
            held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
            place.write_text(f"{sum(weight.nbytes for weight in weights)} {held}")
        elif model.training and self.begun == 2:
            gradients = sum(own(weight.grad).nbytes for weight in weights if weight.grad is not None)
            place.write_text(f"{place.read_text()} {gradients}")
        return None
"""
"""Objectives that are installed like third-party packages."""


@pytest.mark.requirement("H1", "H4")
@pytest.mark.parametrize(
    ("strategy", "method", "tolerance"),
    [*STRATEGIES, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE_STRATEGIES)],
)
def test_two_processes_match_one_process_on_the_same_rows(
    runs: Runs, started: Forks, strategy: str, method: dict[str, Any], tolerance: float
) -> None:
    trained = f"{method.get('dtype', 'adapter')}-{method.get('objective', 'sft')}"
    name = f"{strategy}-{trained}"
    one = started.train(runs.job(f"{trained}-one", batch_size=4, **method))  # one run for all strategies
    shared = {"batch_size": rows_at_once(strategy), "distributed": shape(strategy, 2)}
    two = started.train(runs.job(f"{name}-two", **shared, **method))
    assert losses_of(two) == pytest.approx(losses_of(one), rel=tolerance)
    assert runs.losses(f"{name}-two") == list(losses_of(two).items())
    validation = [dict(runs.losses(which, "eval/loss")) for which in (f"{trained}-one", f"{name}-two")]
    assert set(validation[0]) == {2, 4, 6, 8} and validation[1] == pytest.approx(validation[0], rel=tolerance)
    if strategy in CUT and tolerance < 1e-3:
        folders = [runs.place.store.fetch(made.artifacts["weights"], runs.folder / "cache") for made in (one, two)]
        whole, cut = (load_file(folder / "model.safetensors") for folder in folders)
        assert whole.keys() == cut.keys()
        assert all((cut[name] - weight).norm() < tolerance * weight.norm() for name, weight in whole.items())


@pytest.mark.parametrize(
    ("strategy", "method"), [("ddp", {"lora_dropout": 0.1}), pytest.param("hybrid", FULL, marks=pytest.mark.long)]
)
def test_run_ends_bit_identical_whichever_process_is_killed(
    runs: Runs, started: Forks, strategy: str, method: dict[str, Any]
) -> None:
    """Uses SFT; `test_kill_resume` covers the other strategies and objectives."""
    name = f"{strategy}-killed"
    settings: dict[str, Any] = {"batch_size": 2, "max_steps": 20, "distributed": shape(strategy, 2), **method}
    whole = started.train(runs.job(f"{name}-whole", **settings))
    due = [random.randrange(first, first + 4) for first in (1, 7, 13)]
    victims: list[Callable[[int], int]] = [lambda pid: pid, lambda pid: children(pid)[0], lambda pid: children(pid)[1]]
    random.shuffle(victims)
    job = runs.job(f"{name}-killed", **settings)
    killed: dict[int, int] = {}

    def kill(line: str) -> None:
        """Kill once per start, at its first due step; ignore its later lines."""
        pid = read_pid(Path(job.work_dir))
        if due and pid and pid not in killed and step_of(line) >= due[0]:
            os.kill(victims.pop()(pid), signal.SIGKILL)
            killed[pid] = due.pop(0)

    result = runs.train(job, kill)
    assert len(killed) == 3, killed
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }, killed
    assert losses_of(result) == losses_of(whole)
    assert runs.losses(f"{name}-killed") == list(losses_of(whole).items())


@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("fsdp", FULL),
        ("deepspeed_zero3", FULL),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("ddp", {}), ("tensor", FULL), ("deepspeed_zero2", FULL))
        ),
    ],
)
def test_run_resumes_with_one_process_and_again_with_two(
    runs: Runs, started: Forks, strategy: str, method: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are equal up to the rounding of reordered sums; the rows are the same."""
    install("recording", RECORDING, tmp_path, monkeypatch)
    settings: dict[str, Any] = {"batch_size": rows_at_once(strategy), "max_steps": 24, "objective": "recording", **method}
    settings["distributed"] = shape(strategy, 2)
    whole = started.train(runs.job(f"{strategy}-undisturbed", description=str(tmp_path / "undisturbed"), **settings))

    job = runs.job(f"{strategy}-elastic", description=str(tmp_path / "elastic"), **settings)
    alone = job.model_copy(update={"distributed": Distributed.model_validate(shape(strategy, 1))})
    for there, until in ((job, 2), (alone, 8)):
        started.stop(there, until)
    result = started.train(job)
    assert 8 <= (TrainingFacts.model_validate(result.facts).resumed_from or 0) < 24
    assert losses_of(result) == pytest.approx(losses_of(whole), rel=1e-4)
    consumed = {name: Counter((tmp_path / name).read_text().split()) for name in ("undisturbed", "elastic")}
    assert sum(consumed["undisturbed"].values()) == 24 * 4
    # a step interrupted after its first micro-batch is repeated, and nothing else
    repeated = steps_broken_off(log_of(job).read_text()) * rows_at_once(strategy)
    assert consumed["elastic"] >= consumed["undisturbed"]
    assert sum(consumed["elastic"].values()) == 24 * 4 + repeated


@pytest.mark.requirement("H5")
@pytest.mark.parametrize(("strategy", "share"), [("fsdp", 0.5), ("ddp", 1.0)])
def test_sharding_halves_weights_and_gradients_on_two_processes(
    runs: Runs, started: Forks, strategy: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("weighing", WEIGHING, tmp_path, monkeypatch)
    (tmp_path / "held").mkdir()
    settings: dict[str, Any] = {**FULL, "objective": "weighing", "description": str(tmp_path / "held")}
    settings |= {"batch_size": 1, "gradient_accumulation": 2, "max_steps": 1, "eval_steps": None}
    started.train(runs.job(f"{strategy}-weighed", **settings, distributed=shape(strategy, 2)))
    for rank in "01":
        whole, weights, gradients = map(int, (tmp_path / "held" / rank).read_text().split())
        assert whole > 300_000
        assert weights / whole == pytest.approx(share, abs=0.05)
        assert gradients / whole == pytest.approx(share, abs=0.05), "after the first micro-batch of a step"


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("deepspeed_zero3", marks=pytest.mark.long)])
def test_interrupted_evaluation_stops_all_processes_and_is_repeated_on_resume(
    runs: Runs, started: Forks, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process is stopped in an evaluation, and one killed while it is repeated.

    Every loss is logged once, and equals that of an undisturbed run.
    """
    install("slow", SLOW, tmp_path, monkeypatch)
    settings: dict[str, Any] = {**FULL, "objective": "slow", "max_steps": 6, "distributed": shape(strategy, 2)}
    settings |= {"batch_size": 1, "gradient_accumulation": 2, "eval_steps": 3}
    settings["checkpoint"] = {"interval": "1h", "interval_steps": 100}
    whole = started.train(runs.job(f"{strategy}-evaluated", **settings))
    job = runs.job(f"{strategy}-evaluation-stopped", **settings)
    runs.compute.submit(job)
    wait_for_line(runs.compute, job, lambda line: "evaluating" in line)
    runs.compute.cancel(job)
    said, _ = runs.compute.read_lines(job, 0)
    assert "stop requested: evaluation aborted" in said and "eval loss" not in said, said
    # killed while it repeats the evaluation, then after the server has received it, before a checkpoint holds it
    due = ["resuming from checkpoint 3", "evaluating", "step 3/6 eval loss", "step 6/6 loss", "evaluating", "checkpoint 3"]

    def kill(line: str) -> None:
        pid = read_pid(Path(job.work_dir))
        if due and due[0] in line and pid and due.pop(0) == "evaluating":
            os.kill(children(pid)[1], signal.SIGKILL)

    result = runs.train(job, kill)
    assert not due
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }
    assert losses_of(result) == losses_of(whole)
    for key in ("train/loss", "eval/loss"):
        assert runs.losses(f"{strategy}-evaluation-stopped", key) == runs.losses(f"{strategy}-evaluated", key)


@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("fsdp", FULL),
        ("deepspeed_zero2", FULL),
        pytest.param("ddp", {"lora_dropout": 0.1}, marks=pytest.mark.long),
        pytest.param("deepspeed_zero3", {"lora_dropout": 0.1}, marks=pytest.mark.long),
    ],
)
def test_interrupted_step_stops_all_processes_and_is_repeated_on_resume(
    runs: Runs, started: Forks, strategy: str, method: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process gets SIGTERM in micro-batch 2 of step 2; neither begins the third."""
    install("stopped", STOPPED, tmp_path, monkeypatch)
    settings: dict[str, Any] = {**method, "objective": "stopped", "max_steps": 4, "distributed": shape(strategy, 2)}
    settings |= {"batch_size": 1, "gradient_accumulation": 4, "eval_steps": None}
    settings["checkpoint"] = {"interval": "1h", "interval_steps": 100}
    results = []
    for name, expected in (("undisturbed", [16]), ("asked", [6, 12])):
        folder = tmp_path / name
        folder.mkdir()
        if name == "undisturbed":
            (folder / "asked").touch()
        job = runs.job(f"{strategy}-{name}-in-a-step", description=str(folder), **settings)
        results.append(started.train(job) if name == "undisturbed" else runs.train(job))
        for rank in "01":
            assert list(Counter((folder / rank).read_text().split()).values()) == expected
    whole, result = results
    assert TrainingFacts.model_validate(result.facts).resumed_from == 1
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }
    assert losses_of(result) == losses_of(whole)


def test_sharded_run_starts_from_weights_of_another_run(runs: Runs, started: Forks) -> None:
    settings: dict[str, Any] = {**FULL, "batch_size": 2, "max_steps": 1}
    start = started.train(runs.job("zero3-start", **settings)).artifacts["weights"]
    still = settings | {"learning_rate": 1e-30, "distributed": shape("deepspeed_zero3", 2)}
    job = runs.job("zero3-started", **still)
    made = started.train(job.model_copy(update={"inputs": {**job.inputs, "start": start}})).artifacts["weights"]
    folders = [runs.place.store.fetch(weights, runs.folder / "cache") for weights in (start, made)]
    first, second = (folder.joinpath("model.safetensors").read_bytes() for folder in folders)
    assert first == second
