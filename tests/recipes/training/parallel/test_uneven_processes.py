"""Processes with unequal shares of a step match one process, on the same rows."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import Distributed
from tests.recipes.training.forked_processes import Forks, log_of
from tests.recipes.training.parallel_strategies import shape
from tests.recipes.training.tracked_runs import Runs, install, losses_of, steps_broken_off, wait_for_step
from tests.recipes.training.training_workspace import facts
from tests.support.recipes.two_process_training import FULL, RECORDING

pytestmark = pytest.mark.slow

UNEVEN: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("deepspeed_zero3", {}),
    ("fsdp", FULL | {"objective": "dpo"}),
]
MORE_UNEVEN: list[tuple[str, dict[str, Any]]] = [
    ("fsdp", FULL),
    ("ddp", {"objective": "dpo"}),
    ("deepspeed_zero2", FULL | {"objective": "orpo"}),
]


@pytest.mark.parametrize(
    ("strategy", "method"), [*UNEVEN, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE_UNEVEN)]
)
def test_three_processes_sharing_a_step_unevenly_match_one_process(
    runs: Runs, started: Forks, strategy: str, method: dict[str, Any]
) -> None:
    """Of 10 rows, two processes have 4; the third has an empty second micro-batch."""
    name = f"uneven-{strategy}-{method.get('dtype', 'adapter')}-{method.get('objective', 'sft')}"
    settings: dict[str, Any] = {"batch_size": 2, "gradient_accumulation": 5, **method}
    one = started.train(runs.job(f"{name}-one", **settings))
    shares_of_it = {"gradient_accumulation": 2, "rows_per_step": 10, "distributed": shape(strategy, 3)}
    three = started.train(runs.job(f"{name}-three", **settings | shares_of_it))
    assert losses_of(three) == pytest.approx(losses_of(one), rel=1e-4)
    keys = ["train/grad_norm", "eval/loss"]
    if "objective" in method:
        keys += ["train/reward_accuracy", "train/reward_margin"]
    for key in keys:
        whole, shares = (dict(runs.losses(f"{name}-{which}", key)) for which in ("one", "three"))
        assert shares == pytest.approx(whole, rel=1e-3, abs=1e-6), key
    assert facts(three).tokens == facts(one).tokens


@pytest.mark.parametrize(
    ("strategy", "method"),
    [("ddp", {"lora_dropout": 0.1}), pytest.param("ddp", FULL, marks=pytest.mark.long), ("fsdp", FULL)],
)
def test_killed_run_of_three_processes_ends_bit_identical(
    runs: Runs, started: Forks, strategy: str, method: dict[str, Any]
) -> None:
    """A sum of three numbers depends on their order, which must survive a resume.

    DDP changed it after the first step of each process. The 400 rows of the tied embedding are sharded unevenly:
    FSDP2 computed with a stale head, except in a resumed process that had just loaded it.
    """
    name = f"three-{strategy}-{method.get('dtype', 'adapter')}"
    settings: dict[str, Any] = {"batch_size": 2, "distributed": shape(strategy, 3), **method}
    whole = started.train(runs.job(f"{name}-whole", **settings))
    job = runs.job(f"{name}-killed", **settings)
    started.kill(job, 4, random.Random())
    result = started.train(job)
    assert facts(result).resumed_from
    assert losses_of(result) == losses_of(whole)
    assert "find_unused_parameters" not in log_of(job).read_text()
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }


@pytest.mark.long
def test_run_on_two_processes_resumes_on_three(
    runs: Runs, started: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10 rows, the first process has 4, the others 3 and a placeholder.

    The placeholder is no row of the training split.
    """
    install("recording", RECORDING, tmp_path, monkeypatch)
    settings: dict[str, Any] = {"batch_size": 1, "gradient_accumulation": 5, "max_steps": 12, "objective": "recording"}
    settings["distributed"] = shape("ddp", 2)
    whole = started.train(runs.job("uneven-undisturbed", description=str(tmp_path / "undisturbed"), **settings))

    job = runs.job("uneven-elastic", description=str(tmp_path / "elastic"), **settings)
    runs.compute.submit(job)
    wait_for_step(runs.compute, job, 4, 0)
    runs.compute.cancel(job)
    result = runs.train(job.model_copy(update={"distributed": Distributed.model_validate(shape("ddp", 3))}))
    assert 4 <= (facts(result).resumed_from or 0) < 12
    assert losses_of(result) == pytest.approx(losses_of(whole), rel=1e-4)
    consumed = {name: Counter((tmp_path / name).read_text().split()) for name in ("undisturbed", "elastic")}
    (stands_in,) = consumed["elastic"].keys() - consumed["undisturbed"].keys()
    del consumed["elastic"][stands_in]
    assert sum(consumed["undisturbed"].values()) == 12 * 10
    # an interrupted step is repeated, and nothing else
    said, _ = runs.compute.read_lines(job, 0)
    assert consumed["elastic"] >= consumed["undisturbed"]
    assert sum((consumed["elastic"] - consumed["undisturbed"]).values()) <= steps_broken_off(said) * 8
